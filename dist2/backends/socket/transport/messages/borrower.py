# cython: annotation_typing=False
"""`Borrower`: reads long messages directly from their senders' memory; see `loans`."""

from __future__ import annotations

from collections import deque
from time import monotonic_ns

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.loans import Borrowed
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.backends.socket.wire import Header, Kind
from dist2.runtime.built import check_built
from dist2.runtime.lock import Lock

check_built(__name__, __file__)


class Borrower:
    """Reads offered messages, a piece of each in turn.

    Args:
        lock: The fabric's.
        linkage: The links to senders of offers.
        courier: Sends them the reports.
        outcomes: Completes read messages.
        mailboxes: The mailboxes of the open groups, by context.

    Attributes:
        queue: Messages to read, with the link of each offer. It needs no lock.
    """

    def __init__(
        self,
        lock: Lock,
        linkage: Linkage,
        courier: Courier,
        outcomes: Outcomes,
        mailboxes: dict[int, Mailbox],
    ) -> None:
        self.queue: deque[tuple[Receiving, Link]] = deque()
        self._lock = lock
        self._linkage = linkage
        self._courier = courier
        self._outcomes = outcomes
        self._mailboxes = mailboxes

    def read_until(self, end_ns: int) -> None:
        """Read offered messages, a piece at least, and then notify their senders together.

        With the role of the poller, without the lock: threads that wait for other messages wait until it
        ends.
        """
        self._linkage.gathers = True
        try:
            while self.queue:
                self._read_next(end_ns)
                if monotonic_ns() >= end_ns:
                    break
        finally:
            self._linkage.gathers = False

    def _read_next(self, end_ns: int) -> None:
        """Read one message, or pieces of it until the time is over."""
        try:
            receiving, link = self.queue.popleft()
        except IndexError:
            return
        loan, refused = receiving.loan, False
        assert isinstance(loan, Borrowed)  # only such are queued
        try:
            loan.read()
            while not loan.complete and not receiving.done and monotonic_ns() < end_ns:
                loan.read()
        except OSError:
            refused = True
        except BaseException:  # KeyboardInterrupt, perhaps in a thread that has nothing to do with it
            self.queue.append((receiving, link))
            raise
        with self._lock:
            if receiving.done:
                return
            if refused or loan.complete:
                self._conclude(receiving, link, loan, refused)
            else:
                self.queue.append((receiving, link))

    def _conclude(self, receiving: Receiving, link: Link, loan: Borrowed, refused: bool) -> None:
        """Notify a sender that its message was read, or request it if it cannot be read."""
        mailbox = self._mailboxes.get(receiving.context)
        if mailbox is None or not loan.stands:  # it was taken back: a `CANCEL` is coming
            return
        number = loan.loan.number
        kind = Kind.ACCEPT if refused else Kind.TAKEN
        self._courier.answer(mailbox, receiving.source, Header(kind, 0, mailbox.context, transfer=number))
        if not refused:
            link.incoming.pop(number, None)
            self._outcomes.message_received(receiving)
