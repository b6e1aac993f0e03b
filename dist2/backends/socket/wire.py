"""The data plane's bytes: frames with a fixed header. Sans-IO: without sockets.

Every frame is a `Header` of 56 bytes and ``nbytes`` of payload, little endian. ``docs/wire.md`` has the
table of kinds and the meaning of each field.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Callable
from typing import NamedTuple

import attrs

from dist2.errors import WireError

PROTOCOL_VERSION = 1
EAGER_BYTES = 1 << 16
"""Messages up to this long travel at once; longer ones wait until the receiver has a buffer,"""
RING_MESSAGE_BYTES = 448 << 10
"""save that one up to this long goes at once inside a host, if its ring has room. Longer ones are lent."""
PROMPT_BYTES = 1 << 20
"""And one up to this long may go at once over a socket that is free, within the sender's credit."""
SEGMENT_BYTES = 1 << 20
"""Longest payload of a `DATA` frame: a link is not held up longer than one takes."""
DIRECT_BYTES = 4096
"""Payloads of which more than this is missing are read straight into their place."""
HELLO_BYTES = 4096
TEXT_BYTES = 4096

WAKE = b"!"
"""Between frames: look at the ring that goes with this connection."""

_MAGIC = 0xD2
_FORMAT = struct.Struct("<BBHIQQqQQQ")
HEADER_BYTES = _FORMAT.size
_TRANSFER_AT = HEADER_BYTES - 16
SEQ_AT = 16
"""Where the number of the operation is in a header."""


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
    OFFER = 20
    TAKEN = 21
    ORIGIN = 22
    GAVE_UP = 23


_LOAN = struct.Struct("<QQQ")
LOAN_BYTES = _LOAN.size

_KINDS = {int(kind): kind for kind in Kind}
_LIMITS = {
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
    Kind.OFFER: LOAN_BYTES,
    Kind.PROBE: TEXT_BYTES,
    Kind.CALLED: TEXT_BYTES,
    Kind.ORIGIN: TEXT_BYTES,
    Kind.GAVE_UP: TEXT_BYTES,
}
"""Longest payload of each kind; the others have none."""

TAGGED = 1
"""Flag: a point-to-point message, matched by tag; without it, a collective's, matched by seq and step."""
ANSWER = 2
"""Flag of a `PROBE`: it answers one, and wants no answer itself."""
ABORTED = 4
"""Flag of a `LEAVE`: it was not in good order, and the group cannot go on."""
UNSEEN = 8
"""Flag of a `DEATH`: nobody saw one; a process has lost its connection to another."""


class Header(NamedTuple):
    """The header of a frame.

    Attributes:
        kind: The kind of frame.
        flags: `TAGGED` or 0.
        context: The group.
        seq: Number of the operation (collectives), or of the agreement.
        tag: Step of the schedule (collectives), tag (point-to-point), or byte offset (`DATA`).
        fingerprint: The operation's fingerprint.
        nbytes: Length of the payload that follows.
        transfer: The sender's number of an announced message.
        total: Length of the whole announced message.
    """

    kind: Kind
    flags: int = 0
    context: int = 0
    seq: int = 0
    tag: int = 0
    fingerprint: int = 0
    nbytes: int = 0
    transfer: int = 0
    total: int = 0

    def encode(self) -> bytes:
        """Return the bytes of the header."""
        kind, flags, context, seq, tag, fingerprint, nbytes, transfer, total = self
        return _FORMAT.pack(_MAGIC, kind, flags, nbytes, context, seq, tag, fingerprint, transfer, total)

    @staticmethod
    def about(header: bytes, transfer: int) -> bytes:
        """Return the bytes of a header with another ``transfer``: a fifth of the cost of encoding."""
        return header[:_TRANSFER_AT] + transfer.to_bytes(8, "little") + header[_TRANSFER_AT + 8 :]

    @classmethod
    def decode(cls, data: memoryview | bytes) -> Header:
        """Read a header.

        Raises:
            WireError: The bytes are none, or lengths are invalid for their kind.
        """
        magic, code, flags, nbytes, context, seq, tag, fingerprint, transfer, total = _FORMAT.unpack(data)
        kind = _KINDS.get(code)
        if magic != _MAGIC or kind is None:
            raise WireError(f"not a frame: it begins with {bytes(data[:4]).hex()}")
        if nbytes > _LIMITS.get(kind, 0):
            raise WireError(
                f"a {kind.name} frame of {nbytes} bytes is longer than the {_LIMITS.get(kind, 0)} allowed"
            )
        wrong = kind is Kind.EAGER and nbytes != total
        if kind is Kind.ANNOUNCE or kind is Kind.OFFER:
            wrong = total <= EAGER_BYTES or nbytes != _LIMITS.get(kind, 0)
        if wrong:
            raise WireError(f"a {kind.name} frame of {nbytes} bytes for a message of {total}")
        return cls(kind, flags, context, seq, tag, fingerprint, nbytes, transfer, total)


class Loan(NamedTuple):
    """The payload of an `OFFER`: the address of a long message.

    Attributes:
        number: The sender's number of the message.
        address: Where its first byte lies in the sender's process.
        slot: The slot in the ring's header that holds the number as long as the message may be read.
    """

    number: int
    address: int
    slot: int

    def encode(self) -> bytes:
        """Return the payload."""
        return _LOAN.pack(*self)

    @classmethod
    def decode(cls, payload: bytes | memoryview | bytearray) -> Loan:
        """Read the payload of an `OFFER`, whose length the header has promised."""
        return cls(*_LOAN.unpack(payload))


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


class FrameReader:
    """Turns bytes into frames; long payloads go straight to their buffers.

    Read into `target()`, then say with `received` how much came.

    Args:
        begin: See `Begin`.
        end: See `End`.

    Attributes:
        awaits_long: The next frame is likely to be long: its header is read alone, and the payload then
            straight into its place.
    """

    def __init__(self, begin: Begin, end: End) -> None:
        self.awaits_long = False
        self._begin = begin
        self._end = end
        self._staging = memoryview(bytearray(1 << 16))
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
        if self._missing > DIRECT_BYTES and self._sink is not None:
            return self._sink
        if self.awaits_long and self._header is None and self._filled < HEADER_BYTES:
            return self._staging[self._filled : HEADER_BYTES]
        return self._staging[self._filled :]

    def received(self, count: int) -> None:
        """Take in ``count`` bytes that were read into `target()`.

        Raises:
            WireError: They are not the protocol; the connection is of no more use.
        """
        if self._missing > DIRECT_BYTES and self._sink is not None:
            self._missing -= count
            self._sink = self._sink[count:]
            if self._missing == 0:
                self._finish()
            return
        self._filled += count
        self._parse()

    @property
    def between_frames(self) -> bool:
        """Whether everything read so far was whole frames."""
        return self._header is None and not self._filled

    @property
    def is_amid_long(self) -> bool:
        """Whether the next bytes belong straight to their buffer."""
        return self._missing > DIRECT_BYTES and self._sink is not None

    def resume(self, header: Header, sink: memoryview) -> None:
        """Continue a frame after its header, and the first part of its payload, were read elsewhere.

        Args:
            header: The frame's header; `Begin` is not called.
            sink: The buffer for the missing bytes.
        """
        self._header, self._sink, self._missing = header, sink, len(sink)

    def divert(self) -> None:
        """Discard the rest of the payload that is coming in: its place is taken back."""
        self._sink = None

    def _parse(self) -> None:
        position = 0
        data, filled = self._staging, self._filled
        while True:
            if self._header is None:
                while position < filled and data[position] == WAKE[0]:
                    position += 1
                if filled - position < HEADER_BYTES:
                    break
                header = Header.decode(data[position : position + HEADER_BYTES])
                position += HEADER_BYTES
                self._header = header
                self._missing = header.nbytes
                self._sink = self._begin(header)
            take = min(self._missing, filled - position)
            if take:
                if self._sink is not None:
                    self._sink[:take] = data[position : position + take]
                    self._sink = self._sink[take:]
                self._missing -= take
                position += take
            if self._missing:
                break
            self._finish()
        rest = filled - position
        data[:rest] = bytes(data[position:filled])
        self._filled = rest

    def _finish(self) -> None:
        header = self._header
        self._header, self._sink = None, None
        assert header is not None  # only called inside a frame
        self._end(header)
