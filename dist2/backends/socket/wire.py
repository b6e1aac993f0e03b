# cython: annotation_typing=False
"""The data plane's bytes: frames with a fixed header. Sans-IO: without sockets.

Every frame is a `Header` of 56 bytes and ``nbytes`` of payload, little endian. ``docs/wire.md`` has the
table of kinds and the meaning of each field.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from typing import Any

import attrs
import cython
from cython.cimports.cpython.bytes import PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cython.cimports.cpython.memoryview import PyMemoryView_GET_BUFFER
from cython.cimports.libc.string import memcpy, memmove

from dist2.errors import WireError
from dist2.runtime.built import check_built

check_built(__name__, __file__)

PROTOCOL_VERSION = 1
EAGER_BYTES = 1 << 16
"""Messages up to this long travel at once; longer ones wait until the receiver has a buffer,"""
RING_MESSAGE_BYTES = 448 << 10
"""save that one up to this long goes at once inside a host, if its ring has room,"""
PROMPT_BYTES = 1 << 20
"""and one up to this long over a link that is free; both within the sender's credit."""
SEGMENT_BYTES = 1 << 20
"""Longest payload of a `DATA` frame: a link is not held up longer than one takes."""
DIRECT_BYTES = 4096
"""Payloads of which more than this is missing are read straight into their place."""
HELLO_BYTES = 4096
TEXT_BYTES = 4096

WAKE = b"!"
"""Between frames: look at the ring that goes with this connection."""
STAGED_BYTES = 1 << 16
"""Bytes of short frames that are read at once."""

_MAGIC = 0xD2
HEADER_BYTES = 56


class Kind(enum.IntEnum):
    """The kind of a frame."""

    HELLO = 1
    EAGER = 2
    ANNOUNCE = 3
    ACCEPT = 4
    DATA = 5
    CREDIT = 6
    CANCEL = 7
    MISMATCH = 8
    DEATH = 9
    LEAVE = 10
    BYE = 11
    RING = 12
    REVOKE = 14
    VOTE = 15
    DECISION = 16
    PROBE = 18
    CALLED = 19
    ORIGIN = 22
    GAVE_UP = 23


_KINDS = [None if code not in set(Kind) else Kind(code) for code in range(256)]
_LONGEST = {
    Kind.HELLO: HELLO_BYTES,
    Kind.EAGER: PROMPT_BYTES,
    Kind.DATA: SEGMENT_BYTES,
    Kind.CANCEL: TEXT_BYTES,
    Kind.LEAVE: TEXT_BYTES,
    Kind.REVOKE: TEXT_BYTES,
    Kind.MISMATCH: TEXT_BYTES,
    Kind.DEATH: TEXT_BYTES,
    Kind.RING: TEXT_BYTES,
    Kind.VOTE: TEXT_BYTES,
    Kind.DECISION: TEXT_BYTES,
    Kind.PROBE: TEXT_BYTES,
    Kind.CALLED: TEXT_BYTES,
    Kind.ORIGIN: TEXT_BYTES,
    Kind.GAVE_UP: TEXT_BYTES,
}
"""Longest payload of each kind; the others have none."""
_LIMITS = [_LONGEST.get(kind, 0) if kind is not None else 0 for kind in _KINDS]

TAGGED = 1
"""Flag: a point-to-point message, matched by tag; without it, a collective's, matched by seq and step."""
ANSWER = 2
"""Flag of a `PROBE`: it answers one, and wants no answer itself."""
ABORTED = 4
"""Flag of a `LEAVE`: it was not in good order, and the group cannot go on."""
UNSEEN = 8
"""Flag of a `DEATH`: nobody saw one; a process has lost its connection to another."""


class Header:
    """The header of a frame.

    Attributes:
        kind: The kind of frame.
        flags: `TAGGED`, or those of its kind below.
        context: The group.
        seq: Number of the operation (collectives), or of the agreement.
        tag: Step of the schedule (collectives), tag (point-to-point), byte offset (`DATA`), the flags of a
            letter (`VOTE`, `DECISION`), a member (`REVOKE`), or a member plus 1: the one that the sender lost
            (`LEAVE`), or that will not make the group (`ORIGIN`).
        fingerprint: The operation's fingerprint.
        nbytes: Length of the payload that follows.
        transfer: The sender's number of an announced message.
        total: Length of the whole announced message.
    """

    def __init__(
        self,
        kind: Kind,
        flags: int = 0,
        context: int = 0,
        seq: int = 0,
        tag: int = 0,
        fingerprint: int = 0,
        nbytes: int = 0,
        transfer: int = 0,
        total: int = 0,
    ) -> None:
        self.kind = kind
        self.flags, self.nbytes = flags, nbytes
        self.context, self.seq, self.tag = context, seq, tag
        self.fingerprint, self.transfer, self.total = fingerprint, transfer, total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Header) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())

    def encode(self) -> bytes:
        """Return the bytes of the header."""
        encoded: bytes = PyBytes_FromStringAndSize(cython.NULL, HEADER_BYTES)
        fields: Any = cython.cast("Fields *", PyBytes_AS_STRING(encoded))
        fields.magic, fields.kind, fields.flags, fields.nbytes = _MAGIC, self.kind, self.flags, self.nbytes
        fields.context, fields.seq, fields.tag = self.context, self.seq, self.tag
        fields.fingerprint, fields.transfer, fields.total = self.fingerprint, self.transfer, self.total
        return encoded

    @staticmethod
    def decode(data: memoryview | bytes) -> Header:
        """Read a header.

        Raises:
            WireError: The bytes are none, or lengths are invalid for their kind.
        """
        whole = bytes(data)
        if len(whole) != HEADER_BYTES:
            raise WireError(f"a header has {HEADER_BYTES} bytes, these are {len(whole)}")
        return read_header(whole)


def read_header(at: Any) -> Header:
    """Read a header at an address of C; see `Header.decode`."""
    fields: Any = cython.cast("Fields *", at)
    kind: Kind | None = _KINDS[fields.kind]
    if fields.magic != _MAGIC or kind is None:
        raise WireError(f"not a frame: it begins with {at[:4].hex()}")
    longest, nbytes, total = _LIMITS[kind], fields.nbytes, fields.total
    if nbytes > longest:
        raise WireError(f"a {kind.name} frame of {nbytes} bytes is longer than the {longest} allowed")
    wrong = kind is Kind.EAGER and nbytes != total
    if kind is Kind.ANNOUNCE:
        wrong = total <= EAGER_BYTES
    if wrong:
        raise WireError(f"a {kind.name} frame of {nbytes} bytes for a message of {total}")
    header: Header = Header.__new__(Header)
    header.kind = kind
    header.flags, header.nbytes = fields.flags, nbytes
    header.context, header.seq, header.tag = fields.context, fields.seq, fields.tag
    header.fingerprint, header.transfer, header.total = fields.fingerprint, fields.transfer, total
    return header


@attrs.frozen
class Hello:
    """The first frame of a connection: the caller's identity.

    Attributes:
        job_id: Connections of other jobs are refused.
        fabric_id: The caller's fabric.
        target: The fabric that the caller means to reach.
        ring: Where the caller's later frames will be, if not on this connection.
        version: The version of this protocol.
    """

    job_id: str
    fabric_id: str
    target: str
    ring: str = ""
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        """Return the whole frame."""
        text = json.dumps(attrs.asdict(self)).encode()
        return Header(Kind.HELLO, nbytes=len(text)).encode() + text

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> Hello:
        """Read the payload of a hello.

        Raises:
            WireError: It is not a hello.
        """
        try:
            fields = json.loads(bytes(payload))
            hello = cls(**fields)
        except (ValueError, TypeError, RecursionError) as error:  # nested deeply, JSON recurses
            raise WireError("an unreadable hello") from error
        if not all(
            isinstance(text, str) for text in (hello.job_id, hello.fabric_id, hello.target, hello.ring)
        ):
            raise WireError("a hello whose fields are not text")
        if type(hello.version) is not int:
            raise WireError("a hello whose version is no number")
        return hello


Begin = Callable[[Header], memoryview | None]
"""Called with a header; returns the buffer of its payload, or None to discard it."""
End = Callable[[Header], None]
"""Called when the payload is complete."""


_HEADER_BYTES, _DIRECT_BYTES, _WAKE = HEADER_BYTES, DIRECT_BYTES, ord(WAKE)  # in C


class FrameReader:
    """Turns bytes into frames; long payloads go straight to their buffers.

    Read into `target()`, then say with `received` how much came.

    Args:
        begin: See `Begin`.
        end: See `End`.

    Attributes:
        awaits_long: The next frame is likely to be long, as the last one was: its header is read alone, and
            the payload then straight into its place.
    """

    def __init__(self, begin: Begin, end: End) -> None:
        self.awaits_long = False
        self._begin = begin
        self._end = end
        self._staging = memoryview(bytearray(STAGED_BYTES))
        self._at = cython.cast(cython.p_char, PyMemoryView_GET_BUFFER(self._staging).buf)
        self._filled = 0
        self._header: Header | None = None
        self._sink: memoryview | None = None
        self._missing = 0

    @property
    def rest(self) -> bytes:
        """Bytes of an incomplete header."""
        return bytes(self._staging[: self._filled]) if self._header is None else b""

    def target(self) -> memoryview:
        """Return where the next bytes of the stream belong."""
        if self.is_amid_long():
            assert self._sink is not None  # it is amid a long payload
            return self._sink
        if self.awaits_long and self._header is None and self._filled < _HEADER_BYTES:
            return self._staging[self._filled : _HEADER_BYTES]
        return self._staging[self._filled :] if self._filled else self._staging

    def received(self, count: int) -> None:
        """Take in ``count`` bytes that were read into `target()`.

        Raises:
            WireError: They are not the protocol; the connection is of no more use.
        """
        if not self.is_amid_long():
            self._filled += count
            self._parse()
            return
        assert self._sink is not None  # it is amid a long payload
        self._missing -= count
        self._sink = self._sink[count:]
        if self._missing == 0:
            self._finish()

    def between_frames(self) -> bool:
        """Whether everything read so far was whole frames."""
        return self._header is None and not self._filled

    def is_amid_long(self) -> bool:
        """Whether the next bytes belong straight to their buffer."""
        return self._missing > _DIRECT_BYTES and self._sink is not None

    def divert(self) -> None:
        """Discard the rest of the payload that is coming in: its place is taken back."""
        self._sink = None

    def _parse(self) -> None:
        position, filled = 0, self._filled
        while True:
            if self._header is None:
                while position < filled and self._at[position] == _WAKE:
                    position += 1
                if filled - position < _HEADER_BYTES:
                    break
                self._header = header = read_header(self._at + position)
                position += _HEADER_BYTES
                self._missing = header.nbytes
                self._sink = self._begin(header)
            take = min(self._missing, filled - position)
            if take:
                self._keep(position, take)
                position += take
            if self._missing:
                break
            self._finish()
        self._filled = filled - position
        if position and self._filled:
            memmove(self._at, self._at + position, self._filled)

    def _keep(self, position: int, count: int) -> None:
        """Move bytes of a payload to their place, if it has one."""
        self._missing -= count
        sink = self._sink
        if sink is None:
            return
        if count > len(sink) or sink.readonly:
            raise WireError("a frame that does not fit its buffer")
        memcpy(PyMemoryView_GET_BUFFER(sink).buf, self._at + position, count)
        if self._missing:
            self._sink = sink[count:]

    def _finish(self) -> None:
        header = self._header
        self._header, self._sink = None, None
        assert header is not None  # only called inside a frame
        if header.nbytes:
            self.awaits_long = header.nbytes > _DIRECT_BYTES
        self._end(header)
