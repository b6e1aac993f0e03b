"""`Mailbox`: what one group of this process has posted and what has arrived for it. No sockets here."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import attrs

from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.agreements import Agreements
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending
from dist2.call import Call
from dist2.errors import Dist2Error, GroupAbortedError, GroupRevokedError, WireError
from dist2.wire import TAGGED, Header, Loan


@attrs.frozen
class Called:
    """What a rank called, for those who called something else.

    Attributes:
        seq: Number of the operation.
        fingerprint: Its fingerprint.
        text: What it was, in words.
        call: What it was, in parts.
    """

    seq: int
    fingerprint: int
    text: str
    call: Call = attrs.field()

    @call.default
    def _nothing(self) -> Call:
        return Call(seq=self.seq, text=self.text)


NOTHING_YET = Called(0, 0, "nothing yet")

Describe = Callable[[int | None, int], Called]
"""Returns what this rank called as collective ``seq`` (or last, if that is long ago); for None, the
point-to-point operation whose message has the number that follows (or the last one)."""
OnRevoked = Callable[[GroupRevokedError], None]
Key = tuple[bool, int, int, int]
"""Tagged or not, group rank of the other side, seq, and tag or step."""

Value = TypeVar("Value")

CREDIT_BYTES = 4 << 20
"""What a peer may have sent without its being received: more waits at the sender."""
PROMPT_CREDIT_BYTES = 3 * CREDIT_BYTES // 4
"""How much of it long messages may take that are sent without asking."""
REPORTED_BYTES = CREDIT_BYTES // 4
"""What is received before the sender is told."""
REMEMBERED = 64
"""Operations whose fingerprints are kept at least, for messages that come after their end."""
INTRODUCED = 1024
"""Fingerprints whose meaning is kept, of all members together."""
REASON_BYTES = 1000
"""What is told of an error to others."""
FRAME_COST = 128
"""What a message costs besides its payload, so that empty ones are bounded as well."""


def cost_of(sending: Sending) -> int:
    """Return what a message takes of the sender's credit: an announced one is not held by the receiver."""
    return FRAME_COST + (sending.nbytes if sending.unasked else 0)


@attrs.define(eq=False)
class Arrived:
    """A message that came before its receive.

    Attributes:
        header: Of its `EAGER` or `ANNOUNCE` frame.
        peer: Group rank of the sender.
        payload: Of an eager one.
        local: The send, where the sender is this very rank.
        link: The link it came over.
        loan: Where an offered one lies.
        order: Counts arrivals: a receive from any takes the first.
    """

    header: Header
    peer: int
    payload: bytearray | None = None
    local: Sending | None = None
    link: Link | None = None
    loan: Loan | None = None
    order: int = attrs.field(factory=itertools.count(1).__next__)

    @property
    def key(self) -> Key:
        header = self.header
        tagged = bool(header.flags & TAGGED)
        return (tagged, self.peer, 0 if tagged else header.seq, header.tag)

    @property
    def cost(self) -> int:
        """What it takes of the sender's credit."""
        return FRAME_COST + (len(self.payload) if self.payload is not None else 0)


@attrs.define(eq=False)
class Account:
    """Credit between this rank and one peer, in one group; collectives and point-to-point have one each.

    Attributes:
        used: Cost of what was sent and not reported received.
        owed: Cost of what was received and not yet reported.
        held: Cost of what has arrived and waits for its receive.
        waiting: Sends that wait for credit, in order.
    """

    used: int = 0
    owed: int = 0
    held: int = 0
    waiting: deque[Sending] = attrs.field(factory=deque)


class ByRank(dict[int, Value]):
    """What there is for each member that anything is exchanged with: made when it is wanted first.

    A group that calls nothing but collectives in shared memory has none of it.

    Attributes:
        make: The type of it.
    """

    make: ClassVar[type[Any]]

    def __missing__(self, rank: int) -> Value:
        value: Value = self.make()
        return self.setdefault(rank, value)  # in one step: another thread may be here as well


class Accounts(ByRank[Account]):
    """With each member."""

    make = Account


class Told(ByRank[set[int]]):
    """Numbers that each member was told."""

    make = set


class Mailbox:
    """Matching for one group; the fabric's lock guards it.

    Attributes:
        context: The group's context id.
        rank: The caller's group rank.
        cards: How to reach the members, by group rank.
        fabric_ids: Who they are.
        inside: All are fabrics of this process, reached without a network.
        beside: Members that share memory with this one, so that messages to them may go through it.
        fault: What every pending and later message of the group fails with.
        aborted: Set without the lock, by `abort`; waiters turn it into `fault`.
        describe: See `Describe`.
        mine: What it returned, once ranks called different things.
        described: What the other members say they called then, by group rank.
        offenders: Who sent what this rank did not expect.
        begun: Fingerprints of the latest collectives, by number.
        latest: Number of the latest of them; 0 before the first.
        left: Members that have closed the group.
        aborters: Those of them that aborted it.
        reason: What broke the group on this rank, for those that it leaves waiting.
        reasons: What they said broke it for them.
        on_revoked: Told that a member has revoked the group; under the fabric's lock.
        seen: For each member, the number of the latest collective that it is known to have called.
        told: Fingerprints that each member has been told the meaning of.
        introduced: The meaning of fingerprints, by the group rank that said so.
        met: The latest collective that ended here and that no rank ends before all have called it.
        put_off_ns: Messages between others did not fit: the group is to fail when the collective under way
            has ended, or at this monotonic nanosecond if it does not; 0 where that is not so.
        probes: What blocked members call, as far as this rank has not called it yet, by group rank.
        witness: Says what a member was last seen at, where collectives use no messages.
        unanswered: Members that nobody answered for when they were probed, and since when (in seconds).
        accounts: Credit of collectives and of point-to-point, by group rank.
        sending: Announced sends, by their number.
        accepted: Receives whose payload is coming in.
    """

    def __init__(
        self,
        context: int,
        rank: int,
        cards: Sequence[Card],
        inside: bool,
        describe: Describe,
        beside: frozenset[int] = frozenset(),
        on_revoked: OnRevoked = lambda error: None,
    ) -> None:
        self.context = context
        self.rank = rank
        self.cards = tuple(cards)
        self.fabric_ids = tuple([card.fabric_id for card in cards])
        self.inside = inside
        self.beside = beside
        self.describe = describe
        self.fault: Dist2Error | None = None
        self.aborted: Dist2Error | None = None
        self.mine = NOTHING_YET
        self.described: dict[int, Called] = {}
        self.offenders: set[int] = set()
        self.left: set[int] = set()
        self.aborters: set[int] = set()
        self.reason = b""
        self.reasons: dict[int, str] = {}
        self.on_revoked = on_revoked
        self.seen = [0] * len(cards)
        self.met = 0
        self.put_off_ns = 0
        self.told = Told()
        self.introduced: dict[tuple[int, int], Call] = {}
        self.probes: dict[int, Called] = {}
        self.witness: Callable[[int], str] | None = None
        self.unanswered: dict[int, float] = {}
        self.accounts = (Accounts(), Accounts())
        self.sending: dict[int, Sending] = {}
        self.accepted: set[Receiving] = set()
        self.begun: dict[int, int] = {}
        self.latest = 0
        self._ranks = {fabric_id: rank for rank, fabric_id in enumerate(self.fabric_ids)}
        self._posted: dict[Key, deque[Receiving]] = {}
        self._arrived: dict[Key, deque[Arrived]] = {}

    @cached_property
    def agreements(self) -> Agreements:
        """Its agreements; the fabric's lock guards the first look as well."""
        return Agreements(self.rank, len(self.cards))

    def note_reason(self, error: BaseException) -> None:
        """Keep what broke the group on this rank; the first error is the cause."""
        if not self.reason and not isinstance(error, GroupAbortedError):
            words = ": ".join(filter(None, (type(error).__name__, str(error))))
            self.reason = words.encode(errors="replace")[:REASON_BYTES]

    def take_reason(self, peer: int, text: bytearray | None) -> None:
        """Take in what broke the group on another rank, if it says so."""
        if text and 0 <= peer < len(self.cards):
            self.reasons.setdefault(peer, text[:REASON_BYTES].decode(errors="replace"))

    def said(self, rank: int) -> bytes:
        """Return what broke the group on a member, as far as this rank knows."""
        return self.reason if rank == self.rank else self.reasons.get(rank, "").encode()[:REASON_BYTES]

    def why(self, ranks: Iterable[int]) -> str:
        """Return what ranks said broke the group for them, to go behind what they did; empty if nothing."""
        said = "; ".join(f"rank {rank}: {self.reasons[rank]}" for rank in ranks if rank in self.reasons)
        return f" ({said})" if said else ""

    def rank_of(self, fabric_id: str) -> int | None:
        """Return the group rank of a process; None if it is not in the group."""
        return self._ranks.get(fabric_id)

    # Operations

    def begin(self, seq: int, fingerprint: int) -> bool:
        """Remember what an operation's messages must carry; now and then the oldest are forgotten.

        It takes no lock: this notes first and looks then, and whoever takes in what might not agree notes it
        first and then looks what was begun. So one of the two sees the other.

        Returns:
            Whether anything is here that it might not agree with.
        """
        begun = self.begun
        begun[seq] = fingerprint
        self.latest = seq
        if len(begun) >= 2 * REMEMBERED:  # many at once, which costs less than one each time
            for old in list(begun)[:-REMEMBERED]:
                del begun[old]
        return bool(self._arrived or self.probes or self.described)

    def has_begun(self, seq: int) -> bool:
        """Whether this rank has called operation ``seq``."""
        return bool(self.begun) and seq <= self.latest

    def note_seen(self, peer: int, seq: int, others: Sequence[int]) -> None:
        """Note what a member said: which collective it has called, and what it has seen of the others."""
        if len(others) == len(self.seen):
            self.seen = [max(pair) for pair in zip(self.seen, others, strict=True)]
        self.seen[peer] = max(self.seen[peer], seq)

    def note_called(self, peer: int, seq: int) -> None:
        """Note that a member has called a collective."""
        if seq > self.seen[peer]:
            self.seen[peer] = seq

    def note_introduced(self, peer: int, fingerprint: int, call: Call) -> None:
        """Note what a member means by a fingerprint; the oldest is forgotten."""
        self.introduced[peer, fingerprint] = call
        if len(self.introduced) > INTRODUCED:
            del self.introduced[next(iter(self.introduced))]

    def latest_seen(self) -> list[int]:
        """Return the latest collective that each member is known to have called."""
        seen = [max(seq, self.met) for seq in self.seen]
        seen[self.rank] = self.latest
        return seen

    def strays(self, seq: int) -> Iterator[Arrived]:
        """Yield the messages of an operation that wait for a receive."""
        for key, queue in self._arrived.items():
            if not key[0] and key[2] == seq:
                yield from queue

    def contradicts(self, header: Header) -> bool:
        """Whether a message is of an operation that this rank called differently."""
        if header.flags & TAGGED:
            return False
        return self.begun.get(header.seq, header.fingerprint) != header.fingerprint

    # Receives

    def post(self, receiving: Receiving) -> Arrived | None:
        """Return the message that is here for a receive, or keep the receive until one comes."""
        if receiving.peer == ANY_SOURCE:
            waiting = [
                queue[0]
                for key, queue in self._arrived.items()
                if key[0] and key[3] == receiving.tag and queue
            ]
            if waiting:
                return self._take(min(waiting, key=lambda arrived: arrived.order))
        else:
            queue = self._arrived.get(receiving.key)
            if queue:
                return self._take(queue[0])
        self._posted.setdefault(receiving.key, deque()).append(receiving)
        return None

    def is_free(self, key: Key, from_any: Key) -> bool:
        """Whether a receive of this key posted now would get the next message of it, whatever comes."""
        return key not in self._arrived and key not in self._posted and from_any not in self._posted

    def has_messages_of(self, peer: int, seq: int) -> bool:
        """Whether messages of a collective from a member wait here, or receives of them."""
        for queues in (self._arrived, self._posted):
            for tagged, source, number, _ in queues:
                if source == peer and number == seq and not tagged:
                    return True
        return False

    def match(self, key: Key) -> Receiving | None:
        """Return the receive posted first that takes a message of this key, and forget it."""
        if not key[0]:
            self.note_called(key[1], key[2])
        keys = [key, (True, ANY_SOURCE, 0, key[3])] if key[0] else [key]
        queues = [(queue, each) for each in keys if (queue := self._posted.get(each))]
        if not queues:
            return None
        queue, found = min(queues, key=lambda pair: pair[0][0].number)
        receiving = queue.popleft()
        if not queue:
            del self._posted[found]
        return receiving

    def keep(self, arrived: Arrived) -> None:
        """Hold a message until its receive is posted.

        Raises:
            WireError: Its sender has no credit for it.
        """
        account = self.accounts[arrived.key[0]][arrived.peer]
        account.held += arrived.cost
        if account.held > CREDIT_BYTES and arrived.peer != self.rank:
            raise WireError(f"more than the {CREDIT_BYTES} bytes that a peer may send unreceived")
        self._arrived.setdefault(arrived.key, deque()).append(arrived)

    def forget(self, receiving: Receiving) -> None:
        """Take back a posted receive."""
        queue = self._posted.get(receiving.key)
        if queue and receiving in queue:
            queue.remove(receiving)
            if not queue:
                del self._posted[receiving.key]

    def drop_announced(self, peer: int, transfer: int) -> Arrived | None:
        """Drop a message that its sender took back; return it if it was here."""
        for queue in self._arrived.values():
            for arrived in queue:
                if arrived.peer == peer and arrived.payload is None and arrived.header.transfer == transfer:
                    return self._take(arrived)
        return None

    def waits_for(self, peer: int) -> Iterator[Receiving]:
        """Yield the posted receives that only ``peer`` can serve."""
        for key, queue in self._posted.items():
            if key[1] == peer:
                yield from queue

    def pending(self) -> list[Receiving | Sending]:
        """Return everything that is not done."""
        posted = [receiving for queue in self._posted.values() for receiving in queue]
        waiting = [sending for account in self._all_accounts() for sending in account.waiting]
        return [*posted, *self.accepted, *self.sending.values(), *waiting]

    def _all_accounts(self) -> list[Account]:
        return [account for accounts in self.accounts for account in list(accounts.values())]

    def waits_for_collective(self) -> bool:
        """Whether messages of a collective are pending."""
        return any(not message.tagged for message in self.pending())

    def waits_for_messages_only(self) -> bool:
        """Whether point-to-point messages are pending, and nothing of a collective, which may still end."""
        pending = self.pending()
        return bool(pending) and all(message.tagged for message in pending)

    def watched(self) -> bool:
        """Whether somebody is to be called back about something pending."""
        return any(message.watched for message in self.pending())

    def clear(self) -> None:
        """Forget everything: the group's messages have failed."""
        self._posted.clear()
        self._arrived.clear()
        self.sending.clear()
        self.accepted.clear()
        for account in self._all_accounts():
            account.waiting.clear()
            account.held = 0

    def _take(self, arrived: Arrived) -> Arrived:
        queue = self._arrived[arrived.key]
        queue.remove(arrived)
        if not queue:
            del self._arrived[arrived.key]
        self.accounts[arrived.key[0]][arrived.peer].held -= arrived.cost
        return arrived
