"""Races on slots: between two fences a rank may not write what another reads."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from dist2.backends.socket.algorithms.symbols import BrokenScheduleError


class SlotAccesses:
    """Who touched which slot between which fences.

    A fence holds back all ranks, so two ranks' accesses are ordered if and only if they have passed
    different numbers of fences.
    """

    def __init__(self) -> None:
        self._writes: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._reads: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)

    def wrote(self, owner: int, epoch: int, start: int, stop: int) -> None:
        """Note that the owner wrote ``[start, stop)`` after so many fences."""
        self._writes[owner, epoch].append((start, stop))

    def read(self, owner: int, epoch: int, start: int, stop: int, reader: int) -> None:
        """Note that another rank read ``[start, stop)``."""
        self._reads[owner, epoch].append((start, stop, reader))

    def check(self) -> None:
        """Compare all accesses.

        Raises:
            BrokenScheduleError: Two are a race.
        """
        for (owner, epoch), writes in self._writes.items():
            merged = _merged(writes)
            starts = [start for start, _ in merged]
            for start, stop, reader in self._reads.get((owner, epoch), ()):
                before = bisect_right(starts, stop - 1) - 1
                if before >= 0 and merged[before][1] > start:
                    raise BrokenScheduleError(
                        f"race: rank {reader} reads [{start}, {stop}) of the slot of rank {owner} while that "
                        f"writes {list(merged[before])}, both after {epoch} fences"
                    )


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint intervals, in order, that cover the same."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
