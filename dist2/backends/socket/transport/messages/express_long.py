"""Long messages inside a host whose direct path did not come to its end.

The sender offers its memory (`loans`), the receiver reads it there and reports that: ``express.pyx`` does
both for ranks that wait. If the other side does not come in a moment, or the memory cannot be read, the
message goes on as one of the queue.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.ring import RingWriter
from dist2.backends.socket.transport.messages.delivery import await_announced
from dist2.backends.socket.transport.messages.explaining import HEAR_S
from dist2.backends.socket.transport.messages.loans import Lent
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending
from dist2.backends.socket.wire import Header, Kind, Loan
from dist2.errors import GroupAbortedError, PeerLostError
from dist2.runtime.deadline import deadline_in


class ExpressOffer:
    """The offered messages of a lot.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages to send.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._lot = lot

    def adopt(self, number: int, ring: RingWriter, slot: int, data: memoryview) -> Sending:
        """Have a message that was offered elsewhere go on from here: with the role of the poller.

        Args:
            number: The message's number.
            ring: The ring of the offer.
            slot: The loan's slot.
            data: The message.
        """
        mailbox, lot = self._mailbox, self._lot
        sending = Sending(mailbox.context, lot.peer, True, 0, lot.tag, lot.fingerprint, data, number)
        sending.lend(Lent(ring, slot))
        with self._fabric.lock:
            if mailbox.fault is not None:
                self._fabric.outcomes.finish(sending, mailbox.fault)
            else:
                mailbox.sending[number] = sending
        return sending

    def cancel(self, sending: Sending) -> None:
        """Cancel a message: its memory is not used any more after this."""
        with self._fabric.lock:
            if not sending.done:
                self._fabric.dispatch.cancel(self._mailbox, sending, GroupAbortedError("cancelled"))


class ExpressTake:
    """The messages of a lot that are read out of the sender's memory.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages to receive.
        wait: Waits for a receive that takes the long path after all.
    """

    def __init__(
        self,
        fabric: Fabric,
        mailbox: Mailbox,
        lot: Lot,
        wait: Callable[[Receiving, int], None],
    ) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._lot = lot
        self._wait = wait

    def go_on(self, link: Link, offered: bytes, was_read: bool, address: int, deadline_ns: int) -> None:
        """Complete a receive that the direct path has begun: answer the offer, or request what was not read.

        Args:
            link: The link of the offer.
            offered: The loan.
            was_read: Whether all of it was read.
            address: Where to.
            deadline_ns: The deadline of the receive.

        Raises:
            OperationTimeoutError, PeerLostError, MismatchError, GroupAbortedError: As `Endpoint.wait`.
        """
        receiving, stands = self._answer(link, Loan.decode(offered), address, was_read)
        if receiving is not None:
            if not stands:
                self._hear_why(receiving)
            self._wait(receiving, deadline_ns)

    def _answer(self, link: Link, loan: Loan, address: int, read: bool) -> tuple[Receiving | None, bool]:
        """Say that a message was read; if it was not, return a receive to wait for.

        Returns:
            The receive, and whether the message will come: if not, its sender has given it up.
        """
        fabric, mailbox, peer = self._fabric, self._mailbox, self._lot.peer
        with fabric.lock:
            failure = mailbox.aborted or mailbox.fault
            if failure is not None:
                raise failure
            stands = link.rx is not None and link.rx.is_lent(loan.slot, loan.number)
            receiving = None
            if not (stands and read):
                receiving = self._long_way(address)
                await_announced(mailbox, receiving, link, loan.number)
            if stands:
                kind = Kind.TAKEN if read else Kind.ACCEPT
                answer = Header(kind, 0, mailbox.context, transfer=loan.number)
                fabric.courier.answer(mailbox, peer, answer)
            return receiving, stands

    def _hear_why(self, receiving: Receiving) -> None:
        """Fail a receive after its sender has withdrawn its memory, with the sender's reason.

        The withdrawal in shared memory arrives before the messages: the sender's `CANCEL`, or the report of a
        death that made it give up, is still in flight.
        """
        fabric = self._fabric
        try:
            fabric.poller.run_until(lambda: receiving.done, deadline_in(HEAR_S), lambda: False)
        finally:
            with fabric.lock:
                if not receiving.done:
                    sender = self._mailbox.names([self._lot.peer])
                    gone = PeerLostError(f"{sender} gave up sending", ranks=[self._lot.peer])
                    fabric.dispatch.cancel(self._mailbox, receiving, gone)

    def _long_way(self, address: int) -> Receiving:
        lot = self._lot
        memory = memoryview((ctypes.c_char * lot.nbytes).from_address(address)).cast("B")
        return Receiving(self._mailbox.context, lot.peer, True, 0, lot.tag, lot.fingerprint, memory)
