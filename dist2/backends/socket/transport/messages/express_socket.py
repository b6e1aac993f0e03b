"""`SocketSend` and `SocketReceive`: direct sends over sockets; see ``express.py``.

A send with credit over a free socket passes header and payload to the kernel in one call. A receive reads
directly from the socket, into a header buffer and into the tensor, if no other receive could get its message:
with the expected header the payload is already in place. Any other bytes are handled as if the poller had
read them.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from time import monotonic_ns

from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, PROMPT_CREDIT_BYTES
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending
from dist2.backends.socket.transport.spinning import AWAKE_NS
from dist2.backends.socket.wire import EAGER_BYTES, HEADER_BYTES, PROMPT_BYTES, SEQ_AT, TAGGED, Header, Kind
from dist2.errors import GroupAbortedError

_SEQ = struct.Struct("<Q")

Buffer = ctypes.Array[ctypes.c_char]


def goes_short(lot: Lot) -> bool:
    """Whether messages of a lot may take the short path: longer ones are announced."""
    return lot.nbytes <= PROMPT_BYTES


def first_header(mailbox: Mailbox, lot: Lot) -> Header:
    """Return the header that messages of a lot begin with: of the message, or of its announcement.

    The length of a payload has 32 bits in a header, that of an announced message 64.
    """
    kind, payload = (Kind.EAGER, lot.nbytes) if goes_short(lot) else (Kind.ANNOUNCE, 0)
    flags = TAGGED if lot.tagged else 0
    return Header(kind, flags, mailbox.context, 0, lot.tag, lot.fingerprint, payload, total=lot.nbytes)


def has_socket(link: Link) -> bool:
    """Whether a link's bytes go straight to a socket."""
    return type(link.sock) is socket.socket


class _SocketWay:
    """The state common to both ends.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The common attributes of the messages.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._lot = lot
        self._tagged = lot.tagged
        self._peer = lot.peer
        self._fabric_id = mailbox.fabric_ids[lot.peer]
        self._account = mailbox.accounts[lot.tagged][lot.peer]
        self._header = bytearray(first_header(mailbox, lot).encode())
        self._nbytes = lot.nbytes
        self._cost = FRAME_COST + lot.nbytes
        self._memory_at = (ctypes.c_char * lot.nbytes).from_address

    def _number(self, seq: int) -> None:
        """Have the header be of a collective: they run one at a time."""
        _SEQ.pack_into(self._header, SEQ_AT, seq)


class SocketSend(_SocketWay):
    """Sends the messages of a lot."""

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot) -> None:
        super().__init__(fabric, mailbox, lot)
        self._introduced = False
        # The rest of the credit is for short ones alone.
        self._credit = (CREDIT_BYTES if lot.nbytes <= EAGER_BYTES else PROMPT_CREDIT_BYTES) - self._cost

    def send(self, address: int, seq: int = 0) -> bool | Sending:
        """Send memory by its address.

        Args:
            address: Where the message lies.
            seq: Number of the collective that it is of.

        Returns:
            True if the kernel has it; False, with nothing done, if that takes more than writing it; the send
            to wait for where the kernel took a part.
        """
        fabric, mailbox, account = self._fabric, self._mailbox, self._account
        if not self._tagged:
            self._number(seq)
        elif account.used > self._credit:
            fabric.poller.attend()  # credit may have come meanwhile
        else:
            fabric.poller.glance()
        with fabric.lock:
            link = fabric.outgoing(self._fabric_id)
            if link is None or mailbox.fault is not None or mailbox.aborters or self._peer in mailbox.left:
                return False
            if not self._introduced:
                self._introduce(link, seq)
            sock = link.sock
            if type(sock) is not socket.socket:
                return False
            if not link.is_free_socket or account.waiting or account.used > self._credit:
                return False
            payload = self._memory_at(address)
            try:
                count = sock.sendmsg((self._header, payload))
            except OSError:  # full; or it is gone, which the queue finds as well, and handles
                return False
            except BaseException:  # a signal handler that raises: unrecorded bytes may have been sent
                link.give_up_writing()
                raise
            account.used += self._cost
            if count == HEADER_BYTES + self._nbytes:
                return True
            return self._go_on(link, payload, seq, count)

    def _introduce(self, link: Link, seq: int) -> None:
        self._introduced = True
        lot, mailbox = self._lot, self._mailbox
        if lot.fingerprint not in mailbox.calls.told[lot.peer]:
            self._fabric.comparison.introduce(
                mailbox, link, lot.peer, lot.fingerprint, None if lot.tagged else seq
            )

    def _go_on(self, link: Link, payload: Buffer, seq: int, count: int) -> Sending:
        """Have the rest of a message sent as the long path would."""
        lot = self._lot
        data = memoryview(payload).cast("B")
        sending = Sending(self._mailbox.context, lot.peer, lot.tagged, seq, lot.tag, lot.fingerprint, data)
        sending.unasked = True
        self._fabric.dispatch.send_rest(self._mailbox, link, bytes(self._header), sending, count)
        return sending


class SocketReceive(_SocketWay):
    """Receives the messages of a lot."""

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot) -> None:
        super().__init__(fabric, mailbox, lot)
        self._staged = bytearray(HEADER_BYTES)
        self._keys = ((True, lot.peer, 0, lot.tag), (True, ANY_SOURCE, 0, lot.tag))
        self._posted: Receiving | None = None

    def wait(self, address: int, deadline_ns: int, seq: int = 0) -> bool | Receiving:
        """Receive to an address.

        Args:
            address: Where the message belongs.
            deadline_ns: When to give up.
            seq: Number of the collective that it is of.

        Returns:
            True if it is there; False, with nothing done, if nothing comes in a moment; the receive to wait
            for where only a part of it has come, or something else.
        """
        fabric = self._fabric
        if not self._tagged:
            self._number(seq)
        # Another thread with the role of the poller may be about to read the message.
        received = fabric.poller.play(
            self._receive_if_next, False, self._memory_at(address), seq, deadline_ns
        )
        if received is not True:
            fabric.poller.tell_finished()
        return received

    def _receive_if_next(self, payload: Buffer, seq: int, deadline_ns: int) -> bool | Receiving:
        link = self._link(seq)
        return False if link is None else self._receive(link, payload, seq, deadline_ns)

    def _receive(self, link: Link, payload: Buffer, seq: int, deadline_ns: int) -> bool | Receiving:
        fabric = self._fabric
        self._posted = None
        try:
            count = self._look(link, payload, deadline_ns)
            if not count:
                return False
            if HEADER_BYTES <= count < HEADER_BYTES + self._nbytes and self._staged == self._header:
                count += self._fill(link, payload, count - HEADER_BYTES, deadline_ns)
            with fabric.lock:
                self._take(link, payload, seq, count)
                self._staged[0] = 0
            if self._posted is None:
                return True
            self._go_on(link, self._posted, deadline_ns)
        except BaseException:  # a signal handler that raises
            self._give_up(link)
            raise
        return self._posted

    def _give_up(self, link: Link) -> None:
        """Have nothing use the memory any more."""
        fabric, posted = self._fabric, self._posted
        if self._staged[0]:  # unrecorded bytes have come
            fabric.cut(link)
        if posted is not None:
            with fabric.lock:
                fabric.dispatch.cancel(self._mailbox, posted, GroupAbortedError("cancelled"))

    def _link(self, seq: int) -> Link | None:
        """Return the link of the message, if it would go to a receive that is posted now."""
        fabric, mailbox = self._fabric, self._mailbox
        key, from_any = self._keys if self._tagged else 2 * ((False, self._peer, seq, self._lot.tag),)
        with fabric.lock:
            link = fabric.heard_from(self._fabric_id)
            if link is None or mailbox.fault is not None or not link.reader.between_frames:
                return None
            if link.rx is not None or type(link.sock) is not socket.socket:
                return None
            return link if mailbox.is_free(key, from_any) else None

    def _look(self, link: Link, payload: Buffer, deadline_ns: int) -> int:
        """Read as soon as something comes, for a moment; return how many bytes did."""
        fabric, mailbox, sock = self._fabric, self._mailbox, link.sock
        assert isinstance(sock, socket.socket)  # `_link` saw to it
        read, parts = sock.recvmsg_into, (self._staged, payload)
        self._staged[0] = 0
        crowd, now, end = fabric.poller.crowd, 0, 0
        while True:
            try:
                return read(parts)[0]
            except BlockingIOError:
                pass
            except OSError:
                return 0  # the queue finds it as well, and handles it
            if not end:
                now = monotonic_ns()
                end = min(now + AWAKE_NS, deadline_ns) if fabric.poller.spins else now
            if now >= end or mailbox.aborted is not None or mailbox.fault is not None:
                return 0
            if crowd.is_here(now) or fabric.poller.is_wanted():
                return 0
            fabric.press()
            now = crowd.give_way()

    def _fill(self, link: Link, payload: Buffer, came: int, deadline_ns: int) -> int:
        """Read more of the message, for a moment; return how many bytes."""
        mailbox, sock, data = self._mailbox, link.sock, memoryview(payload).cast("B")
        assert isinstance(sock, socket.socket)  # `_link` saw to it
        crowd, start, now = self._fabric.poller.crowd, came, monotonic_ns()
        end = min(now + AWAKE_NS, deadline_ns)
        while came < self._nbytes:
            try:
                count = sock.recv_into(data[came:])
            except BlockingIOError:
                if now >= end or mailbox.fault is not None or self._fabric.poller.is_wanted():
                    break
                if crowd.is_here(now):
                    break
                self._fabric.press()
                now = crowd.give_way()
                continue
            except OSError:
                break  # the long path finds it as well, as it does the end
            if not count:
                break
            came += count
        return came - start

    def _go_on(self, link: Link, receiving: Receiving, deadline_ns: int) -> None:
        """Read on, as long as something keeps coming, until the message is there."""
        fabric = self._fabric
        end = min(monotonic_ns() + AWAKE_NS, deadline_ns)
        while not receiving.done:
            now = fabric.poller.crowd.give_way()
            fabric.read(link)
            if now >= end or fabric.poller.crowd.is_here(now) or fabric.poller.is_wanted():
                return

    def _take(self, link: Link, payload: Buffer, seq: int, count: int) -> None:
        """Process the bytes read; if the message is incomplete, post a receive for the rest."""
        fabric, mailbox, peer = self._fabric, self._mailbox, self._peer
        came = count - HEADER_BYTES
        if self._staged != self._header or came < 0 or mailbox.fault is not None:
            self._take_other(link, payload, seq, count)
            return
        fabric.delivery.account_for(mailbox, peer, self._tagged, self._cost)
        if not self._tagged:
            mailbox.calls.note_called(peer, seq)
        if came < self._nbytes:
            receiving = self._receiving(payload, seq)
            assert receiving.data is not None  # it is new
            mailbox.accepted.add(receiving)
            link.receiving = receiving
            link.reader.resume(Header.decode(bytes(self._header)), receiving.data[came:])

    def _take_other(self, link: Link, payload: Buffer, seq: int, count: int) -> None:
        """Take in something else; the message may be behind it.

        Then it is moved to where it belongs, from further back in the same memory.
        """
        receiving = self._receiving(payload, seq)
        self._fabric.dispatch.post_recv(self._mailbox, receiving)
        staged, rest = memoryview(self._staged), memoryview(payload).cast("B")
        self._fabric.take_in(link, staged[:count], rest[: max(0, count - HEADER_BYTES)])

    def _receiving(self, payload: Buffer, seq: int) -> Receiving:
        lot, data = self._lot, memoryview(payload).cast("B")
        made = Receiving(self._mailbox.context, lot.peer, lot.tagged, seq, lot.tag, lot.fingerprint, data)
        self._posted = made
        return made
