"""Announced messages, moved by the thread that waits for them: announcement, acceptance, and segments.

`move_message` (``streams.pyx``) moves them; this module tells how far they have come.

The bytes on the wire are those that `Dispatch`, `Delivery` and `Link` make. One number says how much of a
payload has moved: the bytes of its segments so far, headers included.
"""

from __future__ import annotations

import attrs

from dist2.backends.socket.wire import HEADER_BYTES, SEGMENT_BYTES, Header, Kind


@attrs.frozen
class Segment:
    """A part of a payload, with a header of its own.

    Attributes:
        header: Its header.
        start: Where it begins in the payload.
        length: How long it is.
        inside: How much of it has moved, header included.
    """

    header: Header
    start: int
    length: int
    inside: int

    @property
    def moved(self) -> int:
        """How much of its payload has moved."""
        return max(0, self.inside - HEADER_BYTES)

    @property
    def rest(self) -> slice:
        """The stretch of the payload that is still missing of this segment."""
        return slice(self.start + self.moved, self.start + self.length)


def segment_at(done: int, context: int, number: int, nbytes: int, longest: int = SEGMENT_BYTES) -> Segment:
    """Return the current segment of a message."""
    start, inside = divmod(done, HEADER_BYTES + longest)
    start *= longest
    length = max(0, min(longest, nbytes - start))
    header = Header(Kind.DATA, context=context, tag=start, nbytes=length, transfer=number, total=nbytes)
    return Segment(header, start, length, inside)


def whole_of(nbytes: int, longest: int = SEGMENT_BYTES) -> int:
    """Return the state of a complete payload."""
    return nbytes + -(-nbytes // longest) * HEADER_BYTES
