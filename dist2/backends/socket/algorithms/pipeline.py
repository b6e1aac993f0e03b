"""Overlapped passes of a long operation: while one is on the wire, the next is in shared memory.

A pass goes through stages, one a turn of the pipeline; a turn runs one stage of several passes. Data that a
pass leaves in a slot must stay until all ranks have read them. So passes use segments of the slot in turn, so
many that a fence lies between the last read of one and the first write of the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from dist2.backends.socket.algorithms.schedule import chunk_bounds


@attrs.frozen
class Passes:
    """Cuts ``[0, numel)`` into stretches of at most ``size``.

    Attributes:
        numel: Elements in all.
        size: Elements of a pass.
    """

    numel: int
    size: int

    @property
    def count(self) -> int:
        """Number of passes; one of nothing, if there is nothing."""
        return max(1, -(-self.numel // self.size))

    def stretch(self, index: int) -> tuple[int, int]:
        """Return where a pass begins and ends."""
        return min(self.numel, index * self.size), min(self.numel, (index + 1) * self.size)

    def cut(self, index: int, parts: int) -> list[int]:
        """Return where the parts of a pass begin, as equal as can be, and where the last one ends."""
        start, stop = self.stretch(index)
        return [start + bound for bound in chunk_bounds(stop - start, parts)]

    def clip(self, index: int, count: int) -> tuple[int, int]:
        """Return a pass's stretch of a part that may be shorter than ``numel``."""
        start, stop = self.stretch(index)
        return min(start, count), min(stop, count)


def passes_of(numel: int, capacity: int, segments: int) -> tuple[Passes, int]:
    """Return the passes over a vector, and the elements of a slot's segment; a short one has all the slot.

    Args:
        numel: Elements of the vector.
        capacity: Elements of a slot.
        segments: How many the slot is cut into where there are several passes.
    """
    if numel <= capacity:
        return Passes(numel, max(1, numel)), 0
    size = capacity // segments
    return Passes(numel, size), size


def turns(passes: int, lags: tuple[int, ...]) -> Iterator[tuple[int | None, ...]]:
    """Yield, turn by turn, which pass is in each stage.

    Args:
        passes: How many there are.
        lags: By stage, how many turns after its first one a pass gets there.
    """
    for turn in range(passes + max(lags)):
        yield tuple(turn - lag if 0 <= turn - lag < passes else None for lag in lags)
