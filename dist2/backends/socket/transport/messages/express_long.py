"""`ExpressOffer` and `ExpressTake`: direct sends of long messages inside a host; see ``express.py``.

The sender offers its memory (`loans`), the receiver reads it there and reports that. The short path saves
time before and after the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.base import ANY_SOURCE, Transfer
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.ring import RingWriter
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES
from dist2.backends.socket.transport.messages.delivery import await_announced
from dist2.backends.socket.transport.messages.explaining import HEAR_S
from dist2.backends.socket.transport.messages.express import Lot, Watch
from dist2.backends.socket.transport.messages.loans import PIECE_BYTES, Lent
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending, next_number
from dist2.backends.socket.transport.raw import address_of
from dist2.backends.socket.wire import LOAN_BYTES, Header, Kind, Loan
from dist2.compiled import messages
from dist2.errors import GroupAbortedError, PeerLostError, WireError
from dist2.runtime.deadline import deadline_in


class ExpressOffer:
    """Offers the messages of a lot, and waits until they are taken.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages to send.
        spins: How often to look before yielding the core.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot, spins: int) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._lot = lot
        self._fabric_id = mailbox.fabric_ids[lot.peer]
        self._account = mailbox.accounts[True][lot.peer]
        self._header = lot.header(mailbox.context)
        self._cost = lot.cost
        self._taken = Header(Kind.TAKEN, 0, mailbox.context).encode()
        self._watch = Watch(fabric, mailbox, spins)

    def send(self, address: int, view: Callable[[], memoryview], deadline_ns: int) -> Sending | None:
        """Offer memory by its address, and wait a moment until it is taken.

        Args:
            address: Where the message lies.
            view: Returns the same memory; it is called while the receiver is at work already.
            deadline_ns: The deadline of the send.

        Returns:
            The send, done or not; None, with nothing done, if it takes more than writing the offer.
        """
        with self._fabric.lock:
            sending = self._offer(address, view)
        if sending is None:
            return None
        try:
            self._await_taken(sending, deadline_ns)
        except BaseException:  # KeyboardInterrupt: the memory must not be read any more
            self.cancel(sending)
            raise
        return sending

    def post(self, address: int, view: Callable[[], memoryview]) -> Sending | None:
        """Offer memory by its address without waiting; None, with nothing done, if it must be queued."""
        fabric, mailbox, lot = self._fabric, self._mailbox, self._lot
        fabric.poller.glance()
        with fabric.lock:
            if lot.fingerprint not in mailbox.calls.told[lot.peer]:
                return None  # the receiver may ask when this rank computes: the long path says it before
            return self._offer(address, view)

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

    def _offer(self, address: int, view: Callable[[], memoryview]) -> Sending | None:
        fabric, mailbox, account, lot = self._fabric, self._mailbox, self._account, self._lot
        link = fabric.outgoing(self._fabric_id)
        if link is None or mailbox.fault is not None or mailbox.aborters or lot.peer in mailbox.left:
            return None
        tx = link.tx
        if tx is None or not link.clear or account.waiting or account.used + self._cost > CREDIT_BYTES:
            return None
        number = next_number()
        slot = tx.lend(number)
        if slot is None:
            return None
        try:
            pushed = tx.push(self._header + Loan(number, address, slot).encode(), 0, 0)
        except ConnectionError:
            pushed = False  # the queue finds it as well, and handles it
        if not pushed:
            tx.revoke(slot)
            return None
        if tx.reader_sleeps:
            link.wake_peer()
        account.used += self._cost
        sending = Sending(mailbox.context, lot.peer, True, 0, lot.tag, lot.fingerprint, view(), number)
        sending.lend(Lent(tx, slot))
        mailbox.sending[number] = sending
        return sending

    def _await_taken(self, sending: Sending, deadline_ns: int) -> None:
        """Wait a moment for the receiver's answer."""
        link = self._fabric.poller.play(self._take_word, None, sending, deadline_ns)
        if link is not None and link.rx is not None and link.rx.writer_sleeps:
            link.wake_peer()

    def _take_word(self, sending: Sending, deadline_ns: int) -> Link | None:
        """Take the receiver's answer out of the ring, if it arrives; return the links to poll."""
        fabric = self._fabric
        taken = Header.about(self._taken, sending.number)
        with fabric.lock:
            link = fabric.ringed_from(self._fabric_id)
        if link is None or link.rx is None or not link.reader.between_frames:
            return None
        rx = link.rx
        try:
            if not rx.has_bytes and not self._watch.sees(rx, deadline_ns):
                return None
            with fabric.lock:
                if not sending.done and rx.pull(taken, 0, 0):
                    fabric.outcomes.message_sent(sending)
        except WireError:
            return None  # the queue finds it as well, and handles it
        return link


class ExpressTake:
    """Receives the messages of a lot out of the sender's memory.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages to receive.
        spins: How often to look before yielding the core.
        wait: Waits for a receive that takes the long path after all.
        express: The short path in C, which reads the offers of posted receives.
    """

    def __init__(
        self,
        fabric: Fabric,
        mailbox: Mailbox,
        lot: Lot,
        spins: int,
        wait: Callable[[Receiving, int], None],
        express: messages.Express,
    ) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._peer = lot.peer
        self._fabric_id = mailbox.fabric_ids[lot.peer]
        self._header = lot.header(mailbox.context)
        self._nbytes = lot.nbytes
        self._cost = lot.cost
        self._keys = ((True, lot.peer, 0, lot.tag), (True, ANY_SOURCE, 0, lot.tag))
        self._watch = Watch(fabric, mailbox, spins)
        self._express = express
        self._lot = lot
        self._wait = wait
        self._taken = Header(Kind.TAKEN, 0, mailbox.context).encode()

    def take(self, address: int) -> bool:
        """Return False: a caller that does not wait has no time to read, either."""
        return False

    def wait(self, address: int, deadline_ns: int) -> bool:
        """Receive to an address; False, with nothing done, if no message arrives soon.

        Raises:
            OperationTimeoutError, PeerLostError, MismatchError, GroupAbortedError: As `Endpoint.wait`.
        """
        offered = bytearray(LOAN_BYTES)
        link = self._pull(address_of(memoryview(offered)), deadline_ns)
        if link is None:
            return False
        loan = Loan.decode(offered)
        self._end(link, loan, address, self._read(link, loan, address), deadline_ns)
        return True

    def _pull(self, address: int, deadline_ns: int) -> Link | None:
        """Take the expected offer out of the ring, its loan to an address; return the link it came over.

        It does so with the role of the poller: a thread that has it may be about to take in the frame.
        """
        link = self._fabric.poller.play(self._take_out, None, address, deadline_ns)
        if link is not None and link.rx is not None and link.rx.writer_sleeps:
            link.wake_peer()
        return link

    def _take_out(self, address: int, deadline_ns: int) -> Link | None:
        """Do as `_pull`, with the role."""
        fabric, link = self._fabric, self._link()
        if link is None:
            return None
        rx = link.rx
        assert rx is not None  # it is how the link was found
        if not rx.has_bytes and not self._watch.sees(rx, deadline_ns):
            return None
        try:
            with fabric.lock:
                if self._mailbox.fault is not None or not self._mailbox.is_free(*self._keys):
                    return None
                if not rx.pull(self._header, address, LOAN_BYTES):
                    return None
                fabric.delivery.account_for(self._mailbox, self._peer, True, self._cost)
        except WireError:
            return None  # the queue finds it as well, and handles it
        return link

    def _link(self) -> Link | None:
        """Return the link of the message, if it would go to a receive that is posted now."""
        fabric, mailbox = self._fabric, self._mailbox
        with fabric.lock:
            link = fabric.ringed_from(self._fabric_id)
            if link is None or mailbox.fault is not None or not link.reader.between_frames:
                return None
            return link if mailbox.is_free(*self._keys) else None

    def wait_posted(self, receiving: Transfer, address: int, deadline_ns: int) -> bool:
        """Wait for the message of a receive that is posted, and read it; False if that takes longer.

        Receives of the lot that were posted before it are served as well. Messages with offers that were read
        already take the long path: nothing more of those comes through the ring.
        """
        if not self._fabric.poller.borrows:
            self._express.fetch_posted(receiving, self._adopt, deadline_ns)
        return receiving.done

    def _adopt(self, receiving: Receiving, link: Link, offered: bytes) -> None:
        """Have the polling thread read an offered message for a receive; with the role of the poller."""
        fabric, mailbox, loan = self._fabric, self._mailbox, Loan.decode(offered)
        with fabric.lock:
            failure = mailbox.aborted or mailbox.fault
            if failure is not None:
                fabric.outcomes.finish(receiving, failure)
            else:
                fabric.delivery.accept(mailbox, receiving, link, loan.number, loan)

    def go_on(self, link: Link, offered: bytes, was_read: int, address: int, deadline_ns: int) -> None:
        """Complete a receive that was begun in C.

        Args:
            link: The link of the offer.
            offered: The loan.
            was_read: Whether all of it was read.
            address: Where to.
            deadline_ns: The deadline of the receive.

        Raises:
            OperationTimeoutError, PeerLostError, MismatchError, GroupAbortedError: As `Endpoint.wait`.
        """
        self._end(link, Loan.decode(offered), address, bool(was_read), deadline_ns)

    def _end(self, link: Link, loan: Loan, address: int, read: bool, deadline_ns: int) -> None:
        """Answer an offer, and request the unread rest."""
        receiving, stands = self._answer(link, loan, address, read)
        if receiving is not None and not stands:
            self._hear_why(receiving)
        if receiving is not None:
            self._wait(receiving, deadline_ns)

    def _read(self, link: Link, loan: Loan, address: int) -> bool:
        """Read a message where it lies; False if that is refused, or the group has failed meanwhile."""
        rx, mailbox, start, nbytes = link.rx, self._mailbox, 0, self._nbytes
        if rx is None or not rx.pid:
            return False
        try:
            while start < nbytes and mailbox.aborted is None and mailbox.fault is None:
                count = min(nbytes - start, PIECE_BYTES)
                cross_memory.read(rx.pid, address + start, loan.address + start, count)
                start += count
        except OSError:
            return False
        return start == nbytes

    def _answer(self, link: Link, loan: Loan, address: int, read: bool) -> tuple[Receiving | None, bool]:
        """Say that a message was read; if it was not, return a receive to wait for.

        Returns:
            The receive, and whether the message will come: if not, its sender has given it up.
        """
        fabric, mailbox = self._fabric, self._mailbox
        with fabric.lock:
            failure = mailbox.aborted or mailbox.fault
            if failure is not None:
                raise failure
            stands = link.rx is not None and link.rx.is_lent(loan.slot, loan.number)
            if stands and read:
                self._say_taken(loan.number)
                return None, True
            receiving = self._long_way(address)
            await_announced(mailbox, receiving, link, loan.number)
            if stands:
                accept = Header(Kind.ACCEPT, 0, mailbox.context, transfer=loan.number)
                fabric.courier.answer(mailbox, self._peer, accept)
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
                    sender = self._mailbox.names([self._peer])
                    gone = PeerLostError(f"{sender} gave up sending", ranks=[self._peer])
                    fabric.dispatch.cancel(self._mailbox, receiving, gone)

    def _long_way(self, address: int) -> Receiving:
        lot = self._lot
        memory = memoryview((ctypes.c_char * self._nbytes).from_address(address)).cast("B")
        return Receiving(self._mailbox.context, lot.peer, True, 0, lot.tag, lot.fingerprint, memory)

    def _say_taken(self, number: int) -> None:
        """Tell the sender that its message was taken."""
        if not self._say_at_once(Header.about(self._taken, number)):
            taken = Header(Kind.TAKEN, 0, self._mailbox.context, transfer=number)
            self._fabric.courier.answer(self._mailbox, self._peer, taken)

    def _say_at_once(self, frame: bytes) -> bool:
        """Put a frame into the ring; False if others are queued before it, or there is no room."""
        link = self._fabric.outgoing(self._fabric_id)
        if link is None or link.tx is None or not link.clear:
            return False
        try:
            if not link.tx.push(frame, 0, 0):
                return False
            if link.tx.reader_sleeps:
                link.wake_peer()
        except ConnectionError:
            return False  # found again, and acted on, by the courier
        return True
