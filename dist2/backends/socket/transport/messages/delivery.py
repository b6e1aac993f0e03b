"""`Delivery`: how messages that have come find their receives. Under the fabric's lock; never blocks.

Long messages were announced only: the receiver accepts when it has a buffer, and the payload goes straight
into it; or it reads them where they lie.
"""

from __future__ import annotations

from time import monotonic_ns

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.assembly import Assembly
from dist2.backends.socket.transport.messages.loans import Borrowed
from dist2.backends.socket.transport.messages.mailbox import (
    REPORTED_BYTES,
    Arrived,
    Mailbox,
)
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.backends.socket.transport.raw import address_of
from dist2.errors import PeerLostError
from dist2.wire import TAGGED, Header, Kind


class Delivery(Assembly):
    """Matches, delivers and answers messages of all groups of a fabric."""

    def _place(self, mailbox: Mailbox, arrived: Arrived) -> None:
        """Give a message to its receive, or keep it until there is one."""
        receiving = mailbox.match(arrived.key)
        if receiving is not None:
            self._deliver(mailbox, arrived, receiving)
        else:
            mailbox.keep(arrived)
            self._contradiction(mailbox, arrived.peer, arrived.header)  # in this order: see `Mailbox.begin`

    def _deliver(self, mailbox: Mailbox, arrived: Arrived, receiving: Receiving) -> None:
        header, peer = arrived.header, arrived.peer
        if peer != mailbox.rank:
            self.account_for(mailbox, peer, receiving.tagged, arrived.cost)
        if not self._agrees(mailbox, receiving, peer, header):
            return
        receiving.source, receiving.nbytes = peer, header.total
        assert receiving.data is not None  # it was posted
        if arrived.payload is not None:
            if header.total:  # an empty buffer may be read-only
                receiving.data[: header.total] = arrived.payload
            self._received(receiving)
        elif arrived.local is not None:
            assert arrived.local.data is not None  # it is pending
            receiving.data[: header.total] = arrived.local.data
            del mailbox.sending[arrived.local.number]
            self.finish(arrived.local, None)
            self._received(receiving)
        else:
            self._accept_announced(mailbox, arrived, receiving)

    def _accept_announced(self, mailbox: Mailbox, arrived: Arrived, receiving: Receiving) -> None:
        assert arrived.link is not None  # it was announced over one
        header, peer = arrived.header, arrived.peer
        if arrived.link.fileno() < 0:
            self.finish(receiving, PeerLostError(f"rank {peer} is gone", ranks=[peer]))
            return
        self.await_announced(mailbox, receiving, arrived.link, header.transfer)
        rx = arrived.link.rx
        if arrived.loan is not None and rx is not None and rx.pid:
            assert receiving.data is not None  # it was posted
            receiving.loan = Borrowed(rx, arrived.loan, address_of(receiving.data), header.total)
            self._borrowing.append((receiving, arrived.link))
            return
        self.answer(mailbox, peer, Header(Kind.ACCEPT, context=mailbox.context, transfer=header.transfer))

    def await_announced(self, mailbox: Mailbox, receiving: Receiving, link: Link, number: int) -> None:
        """Have what comes about a message of this number concern a receive from now on."""
        receiving.missing = receiving.nbytes
        link.incoming[number] = receiving
        mailbox.accepted.add(receiving)

    def borrow_until(self, end_ns: int) -> None:
        """Read messages where they lie, a piece at least, and have their senders told of all at once.

        With the role of the poller, without the lock: whoever waits for something else comes after that.
        """
        self._gathers = True
        try:
            while self._borrowing:
                self._borrow(end_ns)
                if monotonic_ns() >= end_ns:
                    break
        finally:
            self._gathers = False

    def _borrow(self, end_ns: int) -> None:
        """Read one message, or pieces of it until the time is over."""
        try:
            receiving, link = self._borrowing.popleft()
        except IndexError:
            return
        loan, refused = receiving.loan, False
        assert isinstance(loan, Borrowed)  # it is what was queued
        try:
            loan.read()
            while not loan.complete and not receiving.done and monotonic_ns() < end_ns:
                loan.read()
        except OSError:
            refused = True
        except BaseException:  # KeyboardInterrupt, perhaps in a thread that has nothing to do with it
            self._borrowing.append((receiving, link))
            raise
        with self.lock:
            if receiving.done or not (refused or loan.complete):
                if not receiving.done:
                    self._borrowing.append((receiving, link))
                return
            mailbox = self._mailboxes.get(receiving.context)
            if mailbox is not None and loan.stands:  # if not, a `CANCEL` is coming
                kind = Kind.ACCEPT if refused else Kind.TAKEN
                self.answer(
                    mailbox, receiving.source, Header(kind, 0, mailbox.context, transfer=loan.loan.number)
                )
                if not refused:
                    link.incoming.pop(loan.loan.number, None)
                    self._received(receiving)

    def account_for(self, mailbox: Mailbox, peer: int, tagged: bool, cost: int) -> None:
        """Note that a message was received; report often enough that the sender never runs dry."""
        account = mailbox.accounts[tagged][peer]
        account.owed += cost
        if account.owed >= REPORTED_BYTES:
            flags = TAGGED if tagged else 0
            owed, account.owed = account.owed, 0
            self.answer(mailbox, peer, Header(Kind.CREDIT, flags, mailbox.context, total=owed))

    def answer(self, mailbox: Mailbox, peer: int, header: Header) -> None:
        """Send a frame without payload; a peer that is gone needs none."""
        try:
            link = self.reach(mailbox, peer)
        except PeerLostError:
            self.suspect(mailbox.fabric_ids[peer])
            return
        link.put(header.encode())
        if not self._gathers:
            self.flush(link)
