"""Crossings: the sizes at which one algorithm overtakes another, and the measurement that finds each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import log, sqrt

import attrs

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.selection import select
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Row, Thresholds, column
from dist2.cli.bench.workloads import Case
from dist2.operation.kinds import OpKind

NEVER, ALWAYS = 0, 1 << 40
"""Values of a constant with which the algorithm for short vectors is never chosen, and always."""

WORTH = 1.1
"""How many times as fast another constant must be than the default, at the sizes that it concerns."""


@attrs.frozen
class Crossing:
    """A constant of `Thresholds` that one operation's times at several sizes tell.

    Attributes:
        constant: Its name.
        kind: The operation.
        transport: The transport of the ranks.
        low, high: The smallest and largest size to try; those between double.
        shared: On tensors from `dist2.shared_empty`, which are mapped.
        ranks: Least number of ranks.
        plain: The constant is a size. Others are computed by selection from size and ranks.
    """

    constant: str
    kind: OpKind
    transport: str
    low: int
    high: int
    shared: bool = False
    ranks: int = 2
    plain: bool = False

    @property
    def cases(self) -> list[Case]:
        """The cases to measure, from small to large."""
        count = (self.high // self.low).bit_length()
        return [Case(self.kind.value, self.low << step, self.shared) for step in range(count)]

    def default(self, world_size: int) -> int:
        """Return dist2's default for a number of ranks."""
        found: int | Row = getattr(DEFAULT_THRESHOLDS, self.constant)
        return found[column(world_size)] if isinstance(found, tuple) else found

    def changed(self, limits: Thresholds, value: int, world_size: int) -> Thresholds:
        """Return constants with this one replaced: of a row, the number for so many ranks."""
        found: int | Row = getattr(limits, self.constant)
        if not isinstance(found, tuple):
            return limits.changed({self.constant: value})
        at = column(world_size)
        return limits.changed({self.constant: (*found[:at], value, *found[at + 1 :])})

    def thresholds(self, value: int, world_size: int) -> Thresholds:
        """Return the defaults with this constant replaced; in shared memory all else stays in slots."""
        defaults = DEFAULT_THRESHOLDS.mapped_from(ALWAYS) if self.transport == "auto" else DEFAULT_THRESHOLDS
        return self.changed(defaults, value, world_size)

    def value_at(self, nbytes: int, world_size: int) -> int:
        """Return the constant with which algorithms change at a size: found by asking selection."""
        if self.plain:
            return nbytes
        request = Request(self.kind, world_size, (nbytes // 4,), itemsize=4, lends=False)

        def is_short(value: int) -> bool:
            return select(request, self.thresholds(value, world_size)).name != long

        long = select(request, self.thresholds(NEVER, world_size)).name
        return bisect_left(range(ALWAYS), True, key=is_short)

    def best(
        self, sizes: Sequence[int], short: Sequence[float], long: Sequence[float], world_size: int
    ) -> int:
        """Return the constant that times tell: the default, unless another one is clearly faster.

        Noise alone moves a turning point far where the two algorithms take about as long.

        Args:
            sizes, short, long: As of `turning_point`.
            world_size: How many ranks were measured.
        """
        default = self.default(world_size)
        by_default = sum(self.value_at(size, world_size) <= default for size in sizes)
        sums = _sums_of_gains(short, long)
        count = _best_count(sums)
        if sums[count] - sums[by_default] <= log(WORTH) * abs(count - by_default):
            return default
        return self.value_at(_size_at(sizes, count), world_size)


def turning_point(sizes: Sequence[int], short: Sequence[float], long: Sequence[float]) -> int:
    """Return the size up to which the algorithm for short vectors should be used.

    It is the one with the least loss against always choosing the faster of the two, in ratios, summed up
    over all sizes: a single time that noise has spoiled moves it little.

    Args:
        sizes: Bytes, rising.
        short: Seconds that the algorithm for short vectors took for each.
        long: Seconds of the other.
    """
    return _size_at(sizes, _best_count(_sums_of_gains(short, long)))


def _size_at(sizes: Sequence[int], count: int) -> int:
    """Return the size up to which the first so many of these are."""
    if count == 0:
        return sizes[0] // 2
    if count == len(sizes):
        return sizes[-1]
    between = sqrt(sizes[count - 1] * sizes[count])
    return max(sizes[count - 1], int(between) >> 10 << 10)  # whole KiB, for people


def _sums_of_gains(short: Sequence[float], long: Sequence[float]) -> list[float]:
    """Return the gain of the algorithm for short vectors, as logarithms, by the number of its sizes."""
    gains = [log(theirs / own) for own, theirs in zip(short, long, strict=True)]
    return [sum(gains[:count]) for count in range(len(gains) + 1)]


def _best_count(sums: Sequence[float]) -> int:
    return max(range(len(sums)), key=lambda count: sums[count])


_MAPPED_KINDS = {
    "all_reduce_mapped_bytes": OpKind.ALL_REDUCE,
    "reduce_mapped_bytes": OpKind.REDUCE,
    "reduce_scatter_mapped_bytes": OpKind.REDUCE_SCATTER_SINGLE,
    "broadcast_mapped_bytes": OpKind.BROADCAST,
    "all_gather_mapped_bytes": OpKind.ALL_GATHER_SINGLE,
    "gather_mapped_bytes": OpKind.GATHER,
    "scatter_mapped_bytes": OpKind.SCATTER,
    "all_to_all_mapped_bytes": OpKind.ALL_TO_ALL_SINGLE,
}

CROSSINGS = (
    Crossing("one_shot_bytes", OpKind.ALL_REDUCE, "auto", 4 << 10, 1 << 20, plain=True),
    Crossing("one_shot_reduce_bytes", OpKind.REDUCE, "auto", 16 << 10, 8 << 20, plain=True),
    *(
        Crossing(name, kind, "auto", 8 << 10, 4 << 20, shared=True, plain=True)
        for name, kind in _MAPPED_KINDS.items()
    ),
    Crossing("whole_bytes", OpKind.ALL_REDUCE, "tcp", 32 << 10, 8 << 20),
    Crossing("whole_reduce_bytes", OpKind.REDUCE, "tcp", 256 << 10, 16 << 20),
    Crossing("tree_bytes", OpKind.BROADCAST, "tcp", 64 << 10, 16 << 20, ranks=5, plain=True),
)
"""All that one machine can tell: ``short_bytes``, ``doubling_bytes`` and ``crowd`` take many hosts."""
