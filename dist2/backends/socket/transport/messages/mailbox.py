# cython: annotation_typing=False
"""`Mailbox`: posted operations and arrived messages of one group in this process. No sockets here."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.agreements import Agreements
from dist2.backends.socket.transport.messages.calls import Calls, Describe
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, Account
from dist2.backends.socket.transport.messages.made import Origin
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Receiving, Sending
from dist2.backends.socket.wire import TAGGED, Header
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    MismatchError,
    PeerLostError,
    WireError,
)
from dist2.runtime.built import check_built
from dist2.runtime.rank_names import RANKS, RankNames

check_built(__name__, __file__)

OnRevoked = Callable[[GroupRevokedError], None]
Key = tuple[bool, int, int, int]
"""Tagged or not, group rank of the other side, seq, and tag or step."""

_next_arrival = itertools.count(1).__next__

REASON_BYTES = 1000
"""Bytes of an error's text that are sent to others."""
_TOLD_TO_ALL = tuple(kind.__name__ for kind in (MismatchError, PeerLostError, GroupRevokedError))
"""Errors with a cause that reaches all ranks, and not only the one that reports the error."""


def key_of(header: Header, peer: int) -> Key:
    """Return the key of a message by its first frame and its sender's group rank."""
    if header.flags & TAGGED:
        return (True, peer, 0, header.tag)
    return (False, peer, header.seq, header.tag)


class Arrived:
    """A message that arrived before its receive.

    Attributes:
        header: The header of its `EAGER` or `ANNOUNCE` frame.
        peer: Group rank of the sender.
        payload: The payload of an eager message.
        local: The send, where the sender is this very rank.
        link: The link it came over.
        order: Counts arrivals: a receive from any takes the first.
        key: Its key.
    """

    def __init__(
        self,
        header: Header,
        peer: int,
        payload: bytearray | None = None,
        local: Sending | None = None,
        link: Link | None = None,
    ) -> None:
        self.header = header
        self.peer = peer
        self.payload = payload
        self.local = local
        self.link = link
        self.order = _next_arrival()
        self.key = key_of(header, peer)

    @property
    def cost(self) -> int:
        """The credit that it takes of its sender."""
        return FRAME_COST + (len(self.payload) if self.payload is not None else 0)


def _oldest(queues: Iterable[deque[Arrived]]) -> Arrived | None:
    """Return the message that came first; None without one."""
    return min((queue[0] for queue in queues if queue), key=lambda arrived: arrived.order, default=None)


def _ignore_revocation(error: GroupRevokedError) -> None:
    """Called when a group is revoked that was closed here."""


class Mailbox:
    """Matching for one group; the fabric's lock guards it.

    Attributes:
        context: The group's context id.
        rank: The caller's group rank.
        cards: How to reach the members, by group rank.
        names: Names the members in texts.
        fabric_ids: The fabric ids of the members.
        inside: All are fabrics of this process, reached without a network.
        beside: Members that share memory with this one, so that messages to them may go through it.
        calls: The calls of its members.
        fault: The error of every pending and later message of the group.
        aborted: Set without the lock, by `abort`; waiters turn it into `fault`.
        left: Members that have closed the group.
        aborters: The ones among them that aborted it.
        reason: The error that broke the group on this rank, for members that wait for it.
        lost: The member that this rank lost, if that broke the group here, plus 1; or 0.
        reasons: The errors reported by other members.
        followed: By member that reports one: the member that it lost.
        on_revoked: Called when a member has revoked the group; under the fabric's lock.
        unanswered: Members that did not answer probes, or have left, and since when (in seconds).
        accounts: Credit of collectives and of point-to-point, by group rank: of those that messages are
            exchanged with.
        sending: Announced sends, by their number.
        accepted: Receives whose payload is coming in.
        uid: The group's; empty where it is not known.
        asked_ns: When this rank last asked members whether they have made the group; 0 before.
        ask_ns: When it may ask again; 0 before it first wants to.
        gave_up: The error that broke the group on this rank, for senders that do not hear of it otherwise.
        answered: Senders that were told of it.
        apart: The error of a group that other members have not made, as they gave other members.
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
        names: RankNames = RANKS,
        uid: str = "",
    ) -> None:
        self.context = context
        self.uid = uid
        self.ask_ns = self.asked_ns = 0
        self.apart: MismatchError | None = None
        self.gave_up: Dist2Error | None = None
        self.answered: set[int] = set()
        self.rank = rank
        self.names = names
        self.cards = tuple(cards)
        self.fabric_ids = tuple([card.fabric_id for card in cards])
        self.inside = inside
        self.beside = beside
        self.calls = Calls(rank, len(cards), describe, names)
        self.fault: Dist2Error | None = None
        self.aborted: Dist2Error | None = None
        self.left: set[int] = set()
        self.aborters: set[int] = set()
        self.reason = b""
        self.lost = 0
        self.reasons: dict[int, str] = {}
        self.followed: dict[int, int] = {}
        self.on_revoked = on_revoked
        self.unanswered: dict[int, float] = {}
        self.accounts: tuple[defaultdict[int, Account], ...] = (defaultdict(Account), defaultdict(Account))
        self.sending: dict[int, Sending] = {}
        self.accepted: set[Receiving] = set()
        self._posted: dict[Key, deque[Receiving]] = {}
        self._arrived: dict[Key, deque[Arrived]] = {}
        self._agreements: Agreements | None = None
        self._ranks: dict[str, int] = {}

    @property
    def origin(self) -> Origin | None:
        """The call that made it from another group; None if none did."""
        return Origin.of(self.uid)

    @property
    def agreements(self) -> Agreements:
        """Its agreements; the fabric's lock guards the first look as well."""
        if self._agreements is None:
            self._agreements = Agreements(self.rank, len(self.cards))
        return self._agreements

    def let_go(self) -> None:
        """After the group was closed: break the reference cycle with the owner."""
        self.calls.let_go()
        self.on_revoked = _ignore_revocation

    def note_reason(self, error: BaseException) -> None:
        """Keep the error that broke the group on this rank; the first one is the cause."""
        if not self.reason and not isinstance(error, GroupAbortedError):
            words = str(error)
            if not isinstance(error, ResourceWarning):  # that is no failure: the process ended
                words = ": ".join(filter(None, (type(error).__name__, words)))
            self.reason = words[:REASON_BYTES].encode(errors="replace")[:REASON_BYTES]

    def take_reason(self, peer: int, text: bytearray | None) -> None:
        """Note the reported cause of another rank, if there is one."""
        if text and 0 <= peer < len(self.cards):
            self.reasons.setdefault(peer, text[:REASON_BYTES].decode(errors="replace"))

    def follows(self, rank: int) -> bool:
        """Whether a member reports a failure over others, whose report reaches all ranks, perhaps later."""
        return self.reasons.get(rank, "").startswith(_TOLD_TO_ALL)

    def first_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of some departed members that did not leave because of others; all, if each did."""
        return [rank for rank in ranks if not self.follows(rank)] or ranks

    def first_lost(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the members that some departed ones lost first; these, unless all followed others.

        A member that left in good order tells only those that it has a link to, and those tell of it.
        """
        if not all(map(self.follows, ranks)):
            return ranks
        first = set()
        for rank in ranks:
            passed = {rank}
            while (lost := self.followed.get(rank, rank)) not in passed:
                passed.add(lost)
                rank = lost
            first.add(rank)
        return sorted(first - {self.rank}) or ranks

    def said(self, rank: int) -> bytes:
        """Return the known error that broke the group on a member."""
        return self.reason if rank == self.rank else self.reasons.get(rank, "").encode()[:REASON_BYTES]

    def why(self, ranks: Iterable[int]) -> str:
        """Return the known causes of ranks for a broken group, as a suffix of a message; may be empty."""
        ranks = list(ranks)
        said = {rank: text.decode(errors="replace") for rank in ranks if (text := self.said(rank))}
        if not said:
            return ""
        return f" ({said[ranks[0]] if len(ranks) == 1 else self.names.alike(said)})"

    def rank_of(self, fabric_id: str) -> int | None:
        """Return the group rank of a process; None if it is not in the group. Under the fabric's lock."""
        if not self._ranks:
            self._ranks = {fabric_id: rank for rank, fabric_id in enumerate(self.fabric_ids)}
        return self._ranks.get(fabric_id)

    # Operations

    def begin(self, seq: int, fingerprint: int) -> bool:
        """Note the call of this rank as an operation.

        It takes no lock. This thread notes its call first and then looks for frames that might not agree; a
        thread that takes in such a frame notes it first and then looks which calls were begun. So at least
        one of the two sees the other.

        Returns:
            Whether a frame is here that might not agree with it.
        """
        calls = self.calls
        calls.begin(seq, fingerprint)
        return bool(self._arrived or calls.probes or calls.described)

    def strays(self, seq: int) -> Iterator[Arrived]:
        """Yield the messages of an operation that wait for a receive."""
        for key, queue in self._arrived.items():
            if not key[0] and key[2] == seq:
                yield from queue

    # Receives

    def post(self, receiving: Receiving) -> Arrived | None:
        """Return the arrived message of a receive, or keep the receive until one arrives."""
        if receiving.peer == ANY_SOURCE:
            first = self._first_of_any(receiving.tag)
            if first is not None:
                return self._take(first)
        else:
            queue = self._arrived.get(receiving.key)
            if queue:
                return self._take(queue[0])
        self._posted.setdefault(receiving.key, deque()).append(receiving)
        return None

    def holds_any(self, tag: int) -> bool:
        """Whether a point-to-point message of a tag is here."""
        return bool(self._arrived) and any(key[0] and key[3] == tag for key in list(self._arrived))

    def _first_of_any(self, tag: int) -> Arrived | None:
        """Return the oldest point-to-point message of a tag."""
        return _oldest(queue for key, queue in self._arrived.items() if key[0] and key[3] == tag)

    def first_unreceived(self, rank: int) -> Arrived | None:
        """Return the oldest point-to-point message of a member that waits for its receive."""
        return _oldest(queue for key, queue in list(self._arrived.items()) if key[0] and key[1] == rank)

    def match(self, key: Key) -> Receiving | None:
        """Return the receive posted first that takes a message of this key, and forget it."""
        if not key[0]:
            self.calls.note_called(key[1], key[2])
        queue = self._posted.get(key)
        from_any = self._posted.get(any_key := (True, ANY_SOURCE, 0, key[3])) if key[0] else None
        if from_any and not (queue and queue[0].number < from_any[0].number):
            key, queue = any_key, from_any
        if queue is None:
            return None
        receiving = queue.popleft()
        if not queue:
            del self._posted[key]
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
        """Whether a pending operation has a callback."""
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
