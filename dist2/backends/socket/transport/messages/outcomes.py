"""`Outcomes`: how messages and groups end. Everything here runs under the fabric's lock and never blocks.

A message is finished once, with an error or without; a group fails when ranks called different things,
when a member died, or when it was closed. How frames get to another process is left abstract.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection

from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.absent_groups import AbsentGroups
from dist2.backends.socket.transport.messages.mailbox import Account, Mailbox
from dist2.backends.socket.transport.messages.transfer import Message, Receiving, Sending
from dist2.errors import Dist2Error, PeerLostError
from dist2.wire import Header, Kind

LINGER_S = 0.25
"""How long after a member aborted the group what does not need it may still end well: the member may have
done its part of an operation that the others are about to complete."""


class Outcomes(ABC):
    """Finishes, withdraws and fails messages of all groups of a fabric.

    Attributes:
        lock: Guards everything about links and messages.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._mailboxes: dict[int, Mailbox] = {}
        self._absent_groups = AbsentGroups()
        self._ended: Dist2Error | None = None
        self._outgoing: dict[str, Link] = {}
        self._heard: dict[str, Link] = {}
        self._payloads: dict[Link, bytearray] = {}
        self._dead: set[str] = set()
        self._parted: set[str] = set()
        self._deserted: dict[Mailbox, float] = {}
        self._finished: list[Message] = []
        self._borrowing: deque[tuple[Receiving, Link]] = deque()
        self._gathers = False  # what is said now goes out together, when all that came was read

    @abstractmethod
    def suspect(self, fabric_id: str) -> None:
        """Hold a process for gone in a moment, unless it turns out to be there."""

    @abstractmethod
    def reach(self, mailbox: Mailbox, peer: int) -> Link:
        """Return the link to a member, connecting if there is none."""

    @abstractmethod
    def departed(self, mailbox: Mailbox, rank: int) -> None:
        """Take in that a member died or left."""

    @abstractmethod
    def is_watched(self, fabric_id: str) -> bool:
        """Whether the end of a process is seen without any link to it."""

    @abstractmethod
    def _send_waiting(self, mailbox: Mailbox, account: Account) -> None:
        """Send what has waited for credit, as far as it goes."""

    @abstractmethod
    def flush(self, link: Link) -> None:
        """Write what a link has queued, as far as it goes."""

    @abstractmethod
    def _outgoing_and_incoming(self) -> list[Link]:
        """Return all links."""

    def fail(self, mailbox: Mailbox, error: Dist2Error) -> None:
        """Make every pending and later message of a group fail."""
        if mailbox.fault is None:
            mailbox.fault = error
        for message in mailbox.pending():
            if isinstance(message, Receiving) or message.number in mailbox.sending:  # others wait for credit
                self._release(mailbox, message)
            self.finish(message, mailbox.fault)
        mailbox.clear()

    def message_sent(self, sending: Sending) -> None:
        """The last byte of a message is with the kernel."""
        mailbox = self._mailboxes.get(sending.context)
        if mailbox is not None:
            mailbox.sending.pop(sending.number, None)
        self.finish(sending, None)

    def _received(self, receiving: Receiving) -> None:
        mailbox = self._mailboxes.get(receiving.context)
        if mailbox is not None:
            mailbox.accepted.discard(receiving)
        self.finish(receiving, None)

    def finish(self, message: Message, error: BaseException | None) -> None:
        if not message.done:
            message.let_go()
            message.error = error
            message.data = None
            message.done = True
            self._finished.append(message)

    def withdraw(self, mailbox: Mailbox, message: Message) -> None:
        """Take a pending message back: from now on nothing touches its memory."""
        if isinstance(message, Receiving):
            mailbox.forget(message)
            mailbox.accepted.discard(message)
        elif isinstance(message, Sending):
            account = mailbox.accounts[message.tagged][message.peer]
            if message in account.waiting:
                account.waiting.remove(message)
                self._send_waiting(mailbox, account)  # a shorter one behind it may go
                return
            mailbox.sending.pop(message.number, None)
            if message.peer == mailbox.rank:
                mailbox.drop_announced(mailbox.rank, message.number)
                return
        self._release(mailbox, message)

    def _release(self, mailbox: Mailbox, message: Message) -> None:
        """Take a message's memory away from the links."""
        message.let_go()  # before the other side hears of it
        if isinstance(message, Sending):
            out = self._outgoing.get(mailbox.fabric_ids[message.peer])
            if out is not None and not message.is_copied:
                out.withdraw(message, mailbox.reason)
                self.flush(out)
            return
        for link in self._outgoing_and_incoming():
            if link.receiving is message:
                link.reader.divert()
                link.receiving = None
            for number, receiving in list(link.incoming.items()):
                if receiving is message:
                    del link.incoming[number]

    def _link_is_gone(self, link: Link) -> None:
        """Fail what was coming in over a link that closed."""
        self._payloads.pop(link, None)
        coming = list(link.incoming.values())
        if link.receiving is not None and link.receiving not in coming:  # a short message, half here
            coming.append(link.receiving)
        link.receiving = None
        for receiving in coming:
            mailbox = self._mailboxes.get(receiving.context)
            if mailbox is not None:
                mailbox.accepted.discard(receiving)
            self.finish(receiving, PeerLostError("the connection was closed", ranks=[receiving.source]))
        link.incoming.clear()

    def _member_left(self, mailbox: Mailbox, peer: int, how: str = "has left the group") -> None:
        """Fail what is pending with a member that closed the group."""
        mailbox.left.add(peer)
        self.departed(mailbox, peer)
        error = PeerLostError(f"rank {peer} {how}", ranks=[peer])
        alone = len(mailbox.left | {mailbox.rank}) == len(mailbox.cards)
        for message in mailbox.pending():
            if message.source == peer or (alone and message.source == ANY_SOURCE):
                self.withdraw(mailbox, message)
                self.finish(message, error)

    def _member_aborted(self, mailbox: Mailbox, peer: int) -> None:
        """Fail what is pending with a member that aborted the group; and the rest, but a moment later."""
        mailbox.aborters.add(peer)
        self._member_left(mailbox, peer, "aborted the group" + mailbox.why([peer]))
        self._deserted.setdefault(mailbox, time.monotonic() + LINGER_S)

    def _resolve_deserted(self) -> None:
        """Fail the groups that a member aborted a moment ago."""
        now = time.monotonic()
        for mailbox in [each for each, end in self._deserted.items() if end <= now]:
            del self._deserted[mailbox]
            self.fail(mailbox, aborted_error(mailbox))

    def _has_left(self, fabric_id: str) -> None:
        """A process closed everything in good order."""
        for mailbox in self._mailboxes.values():
            peer = mailbox.rank_of(fabric_id)
            if peer is not None and peer not in mailbox.left:
                self._member_left(mailbox, peer)

    def _lost(self, fabric_id: str) -> None:
        """Hold a process for dead: fail its groups, and tell those who have no link to it."""
        affected = [
            mailbox
            for mailbox in self._mailboxes.values()
            if (rank := mailbox.rank_of(fabric_id)) is not None and rank not in mailbox.left
        ]
        if fabric_id in self._dead or not affected:
            return
        self._dead.add(fabric_id)
        # Told first: a message that is withdrawn looks to others like one of a rank that gave up by itself.
        payload = fabric_id.encode()
        frame = Header(Kind.DEATH, nbytes=len(payload)).encode() + payload
        for other, link in list(self._outgoing.items()):
            if other != fabric_id:
                link.put(frame)
                self.flush(link)
        for mailbox in affected:
            error = lost_error(mailbox, self._dead)
            if isinstance(mailbox.fault, PeerLostError):
                mailbox.fault = error  # later errors name all who died
            self.fail(mailbox, error)
            self.departed(mailbox, mailbox.fabric_ids.index(fabric_id))


def lost_error(mailbox: Mailbox, dead: Collection[str]) -> PeerLostError:
    """Return the error that names the members that died."""
    ranks = [rank for rank, fabric_id in enumerate(mailbox.fabric_ids) if fabric_id in dead]
    return PeerLostError(f"rank(s) {', '.join(map(str, ranks))} died", ranks=ranks)


def aborted_error(mailbox: Mailbox) -> PeerLostError:
    """Return the error that names the members that aborted the group."""
    ranks = sorted(mailbox.aborters)
    names = ", ".join(map(str, ranks))
    return PeerLostError(f"rank(s) {names} aborted the group{mailbox.why(ranks)}", ranks=ranks)
