"""Pieces: parts of the slots that operations use in turn, so that not every operation needs a fence.

An operation in which some members do not wait for others claims a piece: the same place in the slots of all,
as all members claim in the same order. The next operation has the next piece, so a member may be some
operations ahead. Before it writes to a piece that was used before, it waits until all have come to a fence
behind that use (``fences.c``). Short operations have pieces of their own, small enough to stay in the cache.
"""

from __future__ import annotations

import attrs

from dist2.operation.engine import CONSTANTS

TINY_BYTES: int = CONSTANTS["TINY_BYTES"]
PIECE_BYTES: int = CONSTANTS["LONGER_BYTES"]
"""The size of a piece of either kind."""

TINY: int = CONSTANTS["TINY"]
LONGER: int = CONSTANTS["LONGER"]
HALVES: int = CONSTANTS["HALVES"]
"""The kinds; a plan may also claim the half of the slots that is next."""

_STAGGER = 64, 4096  # so that pieces do not all lie in the same sets of a cache


@attrs.frozen
class Row:
    """The positions of the pieces of one kind.

    Attributes:
        base: First byte of the first one in a member's region.
        stride: Bytes from one to the next.
        count: How many there are: two at least.
    """

    base: int
    stride: int
    count: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.base + self.stride * self.count


def rows_from(start: int) -> tuple[Row, Row]:
    """Return where the pieces lie if the first begins at ``start`` in a region."""
    tiny = Row(start, TINY_BYTES + _STAGGER[TINY], 32)
    return tiny, Row(-(-tiny.end // 4096) * 4096, PIECE_BYTES + _STAGGER[LONGER], 8)


CONTROL_BYTES = 8192
"""The first bytes of a region: control words, texts, and the table of exposed memory."""

PIECES = rows_from(CONTROL_BYTES)
PIECES_END = PIECES[LONGER].end


def kind_for(nbytes: int) -> int:
    """Return which kind of piece holds so many bytes.

    Raises:
        ValueError: None does.
    """
    if nbytes > PIECE_BYTES:
        raise ValueError(f"a piece holds {PIECE_BYTES} bytes, not {nbytes}")
    return TINY if nbytes <= TINY_BYTES else LONGER
