# cython: annotation_typing=False
"""`Link`: one stream socket to another process, shared by all groups.

Short frames go first, in order; the payloads of long messages follow in segments, taking turns. A link
never stops inside a frame: a message cancelled during a segment is completed from a copy.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from dist2.backends.socket.transport.links.pacing import SETTLING_LOOKS
from dist2.backends.socket.transport.links.ring import RingReader, RingWriter
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending
from dist2.backends.socket.wire import EAGER_BYTES, SEGMENT_BYTES, WAKE, FrameReader, Header, Kind
from dist2.errors import WireError
from dist2.runtime.built import check_built
from dist2.runtime.resources import is_shortage
from dist2.runtime.usage import usage

check_built(__name__, __file__)

_FRAMES_AT_ONCE = 16
_READS_AT_ONCE = 16


class LinkOwner(Protocol):
    """Events that a link reports to its fabric. All under the fabric's lock."""

    def frame_begins(self, link: Link, header: Header) -> memoryview | None: ...
    def frame_ended(self, link: Link, header: Header) -> None: ...
    def message_sent(self, sending: Sending) -> None: ...


class LinkStream(Protocol):
    """The interface of a link's connection: a non-blocking socket, or a ring with the same methods."""

    def fileno(self) -> int: ...
    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int: ...
    def send(self, data: bytes, /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def recv(self, most: int, /) -> bytes: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Link:
    """A connected socket with its queues.

    Attributes:
        sock: The connection.
        peer_id: Fabric id of the other side.
        incoming: Announced messages that were accepted, by the sender's number.
        receiving: The receive of the payload that is arriving.
        wants_write: The socket or ring is full: flush again when there is room.
        held: Bytes that came over it for groups that are not open yet.
        settling: Remaining checks that may find that the other host is near, before it gets BBR: see
            `pacing`.
        silent: Consecutive checks at which the other host did not answer.
        tx: The ring that outgoing frames go through, in place of the socket.
        rx: The ring that incoming frames come through; the socket then carries wake-ups only.
    """

    def __init__(self, owner: LinkOwner, sock: LinkStream, peer_id: str | None) -> None:
        self.sock = sock
        self.peer_id = peer_id
        self.incoming: dict[int, Receiving] = {}
        self.receiving: Receiving | None = None
        self.wants_write = False
        self.held = 0
        self.settling = SETTLING_LOOKS
        self.silent = 0
        self.tx: RingWriter | None = None
        self.rx: RingReader | None = None
        self._owner = owner
        self._frames: deque[tuple[bytes, Sending | None]] = deque()
        self._bulk: deque[Sending] = deque()
        self._writing: list[memoryview] = []
        self._batch: list[Sending] = []
        self._segment_of: Sending | None = None
        self._broken = False
        self._open = True
        usage.opened("data")
        self.reader = FrameReader(
            lambda header: owner.frame_begins(self, header), lambda header: owner.frame_ended(self, header)
        )

    def fileno(self) -> int:
        return self.sock.fileno()

    # Out

    def put(self, frame: bytes) -> None:
        """Queue a short frame, header and payload."""
        if not self._broken:
            self._frames.append((frame, None))

    def stream(self, sending: Sending) -> None:
        """Queue the payload of an announced message that was accepted."""
        if not self._broken:
            self._bulk.append(sending)

    def is_idle(self) -> bool:
        """Whether everything queued was handed to the kernel."""
        return not (self._writing or self._frames or self._bulk)

    def is_clear(self) -> bool:
        """Whether the next write goes out, and goes out first."""
        return not self._broken and self.is_idle()

    @property
    def prompt(self) -> bool:
        """Whether the kernel has every queued short frame; long messages may be in flight."""
        return not self._frames and not (self._writing and self._segment_of is None)

    def send(self, header: bytes, sending: Sending) -> bool:
        """Hand a short message to the kernel; False if it is queued: `message_sent` follows.

        A message is done once the kernel has all of it: later no thread may write the rest.

        Raises:
            OSError: The connection is gone.
        """
        payload = sending.data
        assert payload is not None  # it is pending
        if not self.is_idle():
            self._frames.append((header + bytes(payload), sending))
            return False
        try:
            count = (self.tx or self.sock).sendmsg([header, payload])
        except OSError as error:
            if not (isinstance(error, BlockingIOError) or is_shortage(error)):
                raise
            count = 0
        if count == len(header) + len(payload):
            return True
        self.go_on(header, sending, count)
        return False

    def go_on(self, header: bytes, sending: Sending, count: int) -> None:
        """Have the rest of a message written that the kernel took in part; nothing else is queued."""
        payload = sending.data
        assert payload is not None  # it is pending
        self._batch = [sending]
        if sending.nbytes > EAGER_BYTES:  # `withdraw` copies the rest, if need be
            self._writing = [memoryview(header), payload]
            self._pass_over(count)
        else:
            self._writing = [memoryview((header + bytes(payload))[count:])]

    def flush(self) -> None:
        """Write until the socket or ring is full or nothing is left.

        Raises:
            OSError: The connection is gone.
        """
        while self._writing or self._next_frame():
            try:
                count = (self.tx or self.sock).sendmsg(self._writing)
            except BlockingIOError:
                self.wants_write = True
                return
            self._written(count)
        self.wants_write = False

    def give_up_writing(self) -> None:
        """Drop the queued frames and all later ones: the peer does not read.

        The link stays until its reader has come to the end: the last frames of the other side (the report of
        a clean exit, for example) may not have been read yet.
        """
        self._broken = True
        self._frames.clear()
        self._bulk.clear()
        self._writing = []
        self._batch = []
        self._segment_of = None
        self.wants_write = False
        with suppress(OSError):  # it is gone already; where it is not, the other side now sees the end
            self.sock.shutdown(socket.SHUT_WR)

    def _next_frame(self) -> bool:
        if self._frames:
            count = min(len(self._frames), _FRAMES_AT_ONCE)
            frames = [self._frames.popleft() for _ in range(count)]
            self._writing = [memoryview(frame) for frame, _ in frames]
            self._batch = [sending for _, sending in frames if sending is not None]
            return True
        if not self._bulk:
            return False
        sending = self._segment_of = self._bulk.popleft()
        assert sending.data is not None  # finished and cancelled messages are not in the queue
        segment = sending.data[sending.offset : sending.offset + SEGMENT_BYTES]
        header = Header(
            Kind.DATA,
            context=sending.context,
            tag=sending.offset,
            nbytes=len(segment),
            transfer=sending.number,
            total=sending.nbytes,
        )
        sending.offset += len(segment)
        self._writing = [memoryview(header.encode()), segment]
        return True

    def _written(self, count: int) -> None:
        self._pass_over(count)
        if self._writing:
            return
        batch, self._batch = self._batch, []
        for sent in batch:
            self._owner.message_sent(sent)
        sending, self._segment_of = self._segment_of, None
        if sending is None:
            return
        if sending.offset < sending.nbytes:
            self._bulk.append(sending)
        else:
            self._owner.message_sent(sending)

    def _pass_over(self, count: int) -> None:
        """Drop the written part of the current message."""
        writing = self._writing
        while writing and count >= len(writing[0]):
            count -= len(writing.pop(0))
        if writing:
            writing[0] = writing[0][count:]

    def withdraw(self, sending: Sending, why: bytes = b"") -> None:
        """Stop using the memory of a long message; one that was accepted is cut off by a `CANCEL`.

        Args:
            sending: The message.
            why: The error that broke the group of the sender, to report to the receiver.
        """
        if sending.unasked:
            if sending in self._batch:
                self._batch.remove(sending)
                self._writing = [memoryview(bytes(part)) for part in self._writing]
            return
        if sending in self._bulk:
            self._bulk.remove(sending)
        if self._segment_of is sending:
            self._segment_of = None
            # Its segment is in flight. No filler: if it is the last one, the receiver takes the message for
            # complete before the `CANCEL` arrives.
            self._writing = [memoryview(bytes(part)) for part in self._writing]
        cancel = Header(Kind.CANCEL, context=sending.context, transfer=sending.number, nbytes=len(why))
        self.put(cancel.encode() + why)

    # In

    def read(self) -> bool:
        """Read available bytes, for a bounded number of calls; return whether some came through a socket.

        Raises:
            EOFError: The other side closed.
            OSError: The connection is gone.
            WireError: The bytes break the protocol.
        """
        if self.rx is not None:
            ended = self._take_wakes()
            while self.read_ring() and ended:
                pass
            if ended:
                raise EOFError
            return False
        reader = self.reader
        for turn in range(_READS_AT_ONCE):
            if self.incoming:
                reader.awaits_long = True
            try:
                count = self.sock.recv_into(self._target())
            except BlockingIOError:
                return turn > 0
            if count == 0:
                raise EOFError
            reader.received(count)
            if self.rx is not None or reader.between_frames():
                break
        return True

    def _target(self) -> memoryview:
        target = self.reader.target()
        if not len(target):  # it would be read for ever
            raise WireError("a frame that does not fit its buffer")
        return target

    def read_ring(self) -> bool:
        """Read the ring, for a bounded number of calls; False if it is empty now.

        Raises:
            WireError: The bytes break the protocol.
        """
        rx = self.rx
        assert rx is not None  # only called where there is one
        more = True
        for _ in range(_READS_AT_ONCE):
            try:
                self.reader.received(rx.recv_into(self._target()))
            except BlockingIOError:
                more = False
                break
        if rx.other_sleeps:
            self.wake_peer()
        return more

    def wake_peer(self) -> None:
        """Make the other side look at its rings."""
        with suppress(OSError):  # full: it is about to look; gone: its end is noticed elsewhere
            self.sock.send(WAKE)

    def _take_wakes(self) -> bool:
        """Discard wake-ups; True if the other side has closed."""
        try:
            return not self.sock.recv(4096)
        except BlockingIOError:
            return False
        except ConnectionError:  # closed before it had read our wake-ups: the ring's bytes still count
            return True

    def discard_incoming(self) -> None:
        """Read and drop available bytes: a close with unread bytes resets, and sent data may be lost."""
        with suppress(OSError, WireError):
            for _ in range(_READS_AT_ONCE):
                if not self.sock.recv(SEGMENT_BYTES):
                    return

    def reject(self) -> None:
        """Make the next read find the end."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
        if self._open:
            self._open = False
            usage.closed("data")
