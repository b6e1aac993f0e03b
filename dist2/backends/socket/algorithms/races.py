"""Races on shared and lent memory: between two fences a rank may not write what another touches."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable

from dist2.backends.socket.algorithms.symbols import BrokenScheduleError

Interval = tuple[int, int]


class Accesses:
    """Who touched which memory between which fences.

    A fence holds back all ranks, so two ranks' accesses are ordered if and only if they have passed
    different numbers of fences.
    """

    def __init__(self) -> None:
        self._writes: defaultdict[tuple[Hashable, int], dict[int, list[Interval]]] = defaultdict(dict)
        self._reads: defaultdict[tuple[Hashable, int], dict[int, list[Interval]]] = defaultdict(dict)

    def wrote(self, memory: Hashable, epoch: int, start: int, stop: int, writer: int) -> None:
        """Note that a rank wrote ``[start, stop)`` after so many fences."""
        self._writes[memory, epoch].setdefault(writer, []).append((start, stop))

    def read(self, memory: Hashable, epoch: int, start: int, stop: int, reader: int) -> None:
        """Note that a rank read ``[start, stop)``."""
        self._reads[memory, epoch].setdefault(reader, []).append((start, stop))

    def check(self) -> None:
        """Compare all accesses.

        Raises:
            BrokenScheduleError: Two are a race.
        """
        for (memory, epoch), writers in self._writes.items():
            for writer, writes in writers.items():
                merged = _merged(writes)
                for how, others in (("reads", self._reads.get((memory, epoch), {})), ("writes", writers)):
                    for other, touched in others.items():
                        if other != writer and (found := _overlap(merged, touched)) is not None:
                            raise BrokenScheduleError(
                                f"race: rank {other} {how} {found[1]} of {memory} while rank {writer} "
                                f"writes {found[0]}, both after {epoch} fences"
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
