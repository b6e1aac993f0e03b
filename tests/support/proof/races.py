"""Races on shared and exposed memory: permitted accesses between fences.

Two accesses of different ranks are in order if one of the two ranks has waited for the other in between: at a
fence to which the other came after its access, or for a rank that had waited for it before. Otherwise nothing
orders them independent of the order in this run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import product

import attrs

from support.proof.symbols import BrokenScheduleError

Interval = tuple[int, int]


@attrs.frozen(eq=False)
class Moment:
    """A stretch of a rank's time without a wait or a fence.

    Attributes:
        rank: The rank whose time it is.
        came: The number of fences that it has come to.
        knows: The number of fences of each rank that it has waited for, directly or through another rank.
        beside: The ranks of its host.
        past: All ranks of its host are known to have come to so many fences.
    """

    rank: int
    came: int
    knows: tuple[int, ...]
    beside: tuple[int, ...]
    past: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "past", min([self.knows[rank] for rank in self.beside]))

    def after_coming(self) -> Moment:
        """Return the moment after the rank's arrival at another fence."""
        knows = list(self.knows)
        knows[self.rank] = self.came + 1
        return Moment(self.rank, self.came + 1, tuple(knows), self.beside)

    def after_waiting(self, known: Iterable[int]) -> Moment:
        """Return the moment after a wait for a rank with this knowledge."""
        return Moment(self.rank, self.came, tuple(map(max, self.knows, known)), self.beside)

    def is_after(self, other: Moment) -> bool:
        """Whether the other moment happened before this one."""
        return self.knows[other.rank] > other.came


_Touched = dict[Moment, list[Interval]]
_Time = tuple[int, int]
"""How many fences all ranks of a host are known to have passed, and how many a rank has come to."""


class Accesses:
    """The list of accesses: rank, memory and moment."""

    def __init__(self) -> None:
        self._writes: defaultdict[Hashable, _Touched] = defaultdict(dict)
        self._reads: defaultdict[Hashable, _Touched] = defaultdict(dict)

    def wrote(self, memory: Hashable, moment: Moment, start: int, stop: int) -> None:
        """Note that a rank wrote ``[start, stop)``."""
        self._writes[memory].setdefault(moment, []).append((start, stop))

    def read(self, memory: Hashable, moment: Moment, start: int, stop: int) -> None:
        """Note that a rank read ``[start, stop)``."""
        self._reads[memory].setdefault(moment, []).append((start, stop))

    def check(self) -> None:
        """Compare all accesses.

        Raises:
            BrokenScheduleError: Two are a race.
        """
        for memory, writes in self._writes.items():
            others = {"reads": _by_time(self._reads.get(memory, {})), "writes": _by_time(writes)}
            for (time, writers), (how, touched) in product(_by_time(writes).items(), others.items()):
                for other_time, touchers in touched.items():
                    if time[0] <= other_time[1] and other_time[0] <= time[1]:  # else one is over before
                        _compare(memory, writers, how, touchers)


def _by_time(touched: _Touched) -> dict[_Time, _Touched]:
    """Sort accesses by time."""
    sorted_: dict[_Time, _Touched] = {}
    for moment, intervals in touched.items():
        sorted_.setdefault((moment.past, moment.came), {})[moment] = intervals
    return sorted_


def _compare(memory: Hashable, writers: _Touched, how: str, touchers: _Touched) -> None:
    for writer, writes in writers.items():
        merged = _merged(writes)
        for other, touched in touchers.items():
            if other.rank == writer.rank or (found := _overlap(merged, touched)) is None:
                continue
            if not writer.is_after(other) and not other.is_after(writer):
                raise BrokenScheduleError(
                    f"race: rank {other.rank} {how} {found[1]} of {memory} after {other.came} fences while "
                    f"rank {writer.rank} writes {found[0]} after {writer.came} fences"
                )


def _overlap(merged: list[Interval], touched: list[Interval]) -> tuple[Interval, Interval] | None:
    """Return the first of some intervals that overlaps one of disjoint, ordered ones."""
    starts = [start for start, _ in merged]
    for start, stop in touched:
        before = bisect_right(starts, stop - 1) - 1
        if start < stop and before >= 0 and merged[before][1] > start:
            return merged[before], (start, stop)
    return None


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint intervals, in order, that cover the same."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
