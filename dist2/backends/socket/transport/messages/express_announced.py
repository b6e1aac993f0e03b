"""`AnnouncedSend` and `AnnouncedTake`: direct sends over sockets that are announced first.

On the wire they look like other messages. But the waiting thread announces, consents and moves the payload
itself, without a record of the message and without the interpreter between two segments (`segments`). It does
so only if no other message of the group would have to wait for that. If the message does not come in a
moment, or another frame comes, the long path continues, even inside a frame.
"""

from __future__ import annotations

import ctypes
from time import monotonic_ns

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST
from dist2.backends.socket.transport.messages.delivery import await_announced
from dist2.backends.socket.transport.messages.express_socket import (
    Buffer,
    SocketReceive,
    SocketSend,
    first_header,
    has_socket,
)
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.segments import Segment, segment_at, whole_of
from dist2.backends.socket.transport.messages.streams import move_message
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending, next_number
from dist2.backends.socket.wire import HEADER_BYTES, SEGMENT_BYTES, Header, Kind
from dist2.runtime.signals import ctrl_c

_PATIENCE_NS = 2_000_000
"""Idle time after which the long path takes over."""


class _Passage:
    """The messages of a lot, one at a time, on their way.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages.
        sends: This is the sender's side.

    Attributes:
        number: The sender's number of the message.
        done: How much of its payload has moved.
        asked: How much of the announcement, or of the consent, is sent.
        agreed: It was consented to, or announced.
        filled: How many bytes of a header are in ``staged``: an unexpected header, or an incomplete one.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot, sends: bool) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._sends = sends
        self._nbytes = lot.nbytes
        context, nbytes = mailbox.context, lot.nbytes
        self.announcement = first_header(mailbox, lot).encode()
        self.consent = Header(Kind.ACCEPT, context=context).encode()
        self._header = Header(Kind.DATA, context=context, total=nbytes).encode()
        self._whole = whole_of(nbytes)
        self.staged = bytearray(HEADER_BYTES)
        self._staged_at = ctypes.addressof(ctypes.c_char.from_buffer(self.staged))
        self.begin(0)

    def begin(self, number: int) -> None:
        """Begin with the next message."""
        self.number = number
        self.done = self.asked = self.filled = self._end = 0
        self.agreed = self._ended = False
        self.staged[0] = 0

    @property
    def is_through(self) -> bool:
        """Whether all of the payload has moved."""
        return self.done == self._whole

    @property
    def segment(self) -> Segment:
        """The current segment."""
        return segment_at(self.done, self._mailbox.context, self.number, self._nbytes)

    def go_on(self, out: Link, fd: int, back: int, address: int, deadline_ns: int) -> bool:
        """Move a message on; whether that is worth while once more.

        Args:
            out: The link that this side writes, exclusively for the time.
            fd: The descriptor that carries the message.
            back: The descriptor of the opposite direction.
            address: Where the payload lies.
            deadline_ns: When to give up.
        """
        fabric, mailbox, before = self._fabric, self._mailbox, (self.done, self.asked)
        self.number, self.done, self.asked, self.agreed, self.filled, self._ended = move_message(
            self._sends, fd, back, self.announcement, self.consent, self._header,
            address, self._nbytes, SEGMENT_BYTES, self.number, self.done, self.asked, self.agreed,
            self._staged_at, self.filled, fabric.is_full,
        )  # fmt: skip
        if self.done == self._whole or self._ended or self.filled == HEADER_BYTES:
            return False
        now = monotonic_ns()
        if not self._end or (self.done, self.asked) != before:
            self._end = min(now + _PATIENCE_NS, deadline_ns)
        if now >= self._end or mailbox.aborted is not None or mailbox.fault is not None or ctrl_c.pending:
            return False
        fabric.press()
        return not (out.leased and out.has_frames) and not fabric.poller.is_wanted()


class AnnouncedSend(SocketSend):
    """Sends the messages of a lot."""

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot) -> None:
        super().__init__(fabric, mailbox, lot)
        self._passage = _Passage(fabric, mailbox, lot, sends=True)

    def hand_over(self, address: int, deadline_ns: int) -> bool | Sending:
        """Send memory by its address.

        Args:
            address: Where the message lies.
            deadline_ns: The deadline of the send.

        Returns:
            True if the kernel has it; False, with nothing done, if another transfer is in progress; the send
            to wait for if the receiver does not accept it in a moment.
        """
        poller = self._fabric.poller
        poller.glance()
        sent = poller.play(self._hand_over, False, address, deadline_ns)
        if sent is not True:
            poller.tell_finished()
        return sent

    def _hand_over(self, address: int, deadline_ns: int) -> bool | Sending:
        fabric, passage = self._fabric, self._passage
        with fabric.lock:
            links = self._links()
            if links is None:
                return False
            passage.begin(next_number())
            out, into = links
            self._account.used += FRAME_COST
            out.leased = True
        left: Sending | None = None
        known = False
        try:
            self._carry(out, into, address, deadline_ns)
            with fabric.lock:
                if not passage.is_through:
                    left = self._leave(out, into, address)
                known = True
        finally:
            out.leased = False
            if not known:  # a signal handler that raises: unrecorded bytes may have been sent and received
                fabric.cut(out)
                fabric.cut(into)
            elif out.has_frames or left is not None:
                with fabric.lock:
                    fabric.linkage.flush(out)
        return True if left is None else left

    def _carry(self, out: Link, into: Link, address: int, deadline_ns: int) -> None:
        """Move the message on, as long as that is worth while and the link stands."""
        poller, passage = self._fabric.poller, self._passage
        while passage.go_on(out, out.fileno(), into.fileno(), address, deadline_ns):
            if passage.agreed:  # incoming frames are not read meanwhile
                poller.progress(0)
                if out.fileno() < 0:
                    return

    def _links(self) -> tuple[Link, Link] | None:
        """Return the links of both directions, if both are free."""
        fabric, mailbox, peer = self._fabric, self._mailbox, self._peer
        out = fabric.outgoing(self._fabric_id)
        if out is None or mailbox.fault is not None or mailbox.aborters or peer in mailbox.left:
            return None
        if not self._introduced:
            self._introduce(out, 0)
        into = fabric.heard_from(self._fabric_id) or out
        if not (has_socket(out) and has_socket(into)) or into.rx is not None:
            return None
        if not out.is_free_socket or not into.reader.between_frames or not mailbox.is_quiet:
            return None
        if self._account.waiting or self._account.used + FRAME_COST > CREDIT_BYTES:
            return None
        return out, into

    def _leave(self, out: Link, into: Link, address: int) -> Sending:
        """Have the long path send the rest; under the lock."""
        fabric, mailbox, lot, passage = self._fabric, self._mailbox, self._lot, self._passage
        data = memoryview(self._memory_at(address)).cast("B")
        sending = Sending(mailbox.context, lot.peer, True, 0, lot.tag, lot.fingerprint, data, passage.number)
        mailbox.sending[sending.number] = sending
        segment = passage.segment
        if passage.asked < HEADER_BYTES:
            out.finish_frame(Header.about(passage.announcement, passage.number)[passage.asked :])
        elif passage.agreed:
            sending.accepted = True
            sending.offset = segment.start + (segment.length if segment.inside else 0)
            if segment.inside:
                header = memoryview(segment.header.encode())[segment.inside :]
                out.finish_segment(sending, header, data[segment.rest])
            else:
                out.stream(sending)
        if passage.filled:
            fabric.take_in(into, memoryview(passage.staged)[: passage.filled])
        if mailbox.fault is not None and not sending.done:
            fabric.dispatch.cancel(mailbox, sending, mailbox.fault)
        return sending


class AnnouncedTake(SocketReceive):
    """Receives the messages of a lot."""

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot) -> None:
        super().__init__(fabric, mailbox, lot)
        self._passage = _Passage(fabric, mailbox, lot, sends=False)
        self._staged = self._passage.staged

    def _link(self, seq: int) -> Link | None:
        """Return the link of the message, if it would go to the only receive, posted now."""
        return super()._link(seq) if self._mailbox.is_quiet else None

    def _receive(self, link: Link, payload: Buffer, seq: int, deadline_ns: int) -> bool | Receiving:
        self._posted = None
        try:
            while self._take_over(link, payload, deadline_ns):
                if self._link(seq) is not link:
                    return False
        except BaseException:  # a signal handler that raises
            self._give_up(link)
            raise
        return self._posted or self._passage.is_through

    def _take_over(self, link: Link, payload: Buffer, deadline_ns: int) -> bool:
        """Receive the message as far as it comes; whether something else came, and it may be behind that."""
        fabric, passage = self._fabric, self._passage
        passage.begin(0)
        with fabric.lock:
            out = fabric.outgoing(self._fabric_id)
            if out is None or not has_socket(out) or not out.is_free_socket:
                return False
            out.leased = True
        address = ctypes.addressof(payload)
        try:
            while passage.go_on(out, link.fileno(), out.fileno(), address, deadline_ns):
                if out.leased and passage.asked == HEADER_BYTES:  # this side has nothing more to say
                    self._release(out)
        finally:
            self._release(out)
        with fabric.lock:
            if passage.agreed:
                fabric.delivery.account_for(self._mailbox, self._peer, True, FRAME_COST)
            if not passage.is_through:
                self._leave(link, out, payload)
            passage.staged[0] = 0
        return not passage.agreed and passage.filled == HEADER_BYTES

    def _release(self, out: Link) -> None:
        """Let others write."""
        out.leased = False
        if out.has_frames:
            with self._fabric.lock:
                self._fabric.linkage.flush(out)

    def _leave(self, link: Link, out: Link, payload: Buffer) -> None:
        """Have the long path receive the rest; under the lock."""
        fabric, mailbox, passage = self._fabric, self._mailbox, self._passage
        if passage.agreed:
            receiving, segment = self._receiving(payload, 0), passage.segment
            data = receiving.data
            assert data is not None  # it is new
            if mailbox.fault is None:
                await_announced(mailbox, receiving, link, passage.number)
                receiving.missing = receiving.nbytes - segment.start
            else:
                fabric.outcomes.finish(receiving, mailbox.fault)
            if passage.asked < HEADER_BYTES:
                out.finish_frame(Header.about(passage.consent, passage.number)[passage.asked :])
                fabric.linkage.flush(out)
            if segment.inside:
                link.reader.resume(segment.header, data[segment.rest])
                if receiving.done:
                    link.reader.divert()
                else:
                    link.receiving = receiving
        if passage.filled:
            fabric.take_in(link, memoryview(passage.staged)[: passage.filled])
