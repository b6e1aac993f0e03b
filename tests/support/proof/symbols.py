"""Symbolic elements: the contributions in a value, and the order in which they were folded."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import chain

from dist2.backends.socket.algorithms.hosts import folding_groups
from dist2.errors import Dist2Error

UNDEFINED = -1
"""The symbol of unwritten memory."""


class BrokenScheduleError(Dist2Error):
    """A schedule breaks the contract of its operation; the message says where."""


class Progress(enum.Enum):
    """How far a value is on the way from a contribution to a result."""

    CONTRIBUTION = "contribution"
    PARTIAL = "partial"
    HOST = "partial of a host in rank order"
    RESULT = "result"
    ORDERED_RESULT = "result in rank order"


_COMPLETE = frozenset({Progress.RESULT, Progress.ORDERED_RESULT})


class Symbols:
    """The values of a run, numbered: equal numbers are equal values.

    Args:
        world_size: Ranks of the group.
        layout: Number of each rank's host, see `hosts.py`.
    """

    def __init__(self, world_size: int, layout: tuple[int, ...] = ()) -> None:
        self.world_size = world_size
        self._groups = folding_groups(layout, world_size)
        # By symbol: which element it is a value of, whose contributions went in, and how far it is.
        self._element: list[int] = []
        self._ranks: list[tuple[int, ...]] = []
        self._progress: list[Progress] = []
        self._folded: dict[tuple[tuple[int, ...], bool], int] = {}
        self._numbered = 0

    def describe(self, symbol: int) -> str:
        """Return a symbol's meaning in words."""
        if symbol == UNDEFINED:
            return "undefined"
        ranks = list(self._ranks[symbol])
        return f"{self._progress[symbol].value} of element {self._element[symbol]} from ranks {ranks}"

    def number_elements(self, count: int) -> int:
        """Return the number of the first of ``count`` new elements."""
        first = self._numbered
        self._numbered += count
        return first

    def contributions(self, rank: int, first_element: int, count: int) -> list[int]:
        """Return new symbols: a rank's contributions to consecutive elements."""
        start = len(self._element)
        self._element += range(first_element, first_element + count)
        self._ranks += [(rank,)] * count
        self._progress += [Progress.CONTRIBUTION] * count
        return list(range(start, start + count))

    def fold(self, symbols: tuple[int, ...], final: bool) -> int:
        """Return the symbol of a left fold.

        Raises:
            BrokenScheduleError: Values of different elements, a contribution that counts twice, a
                result folded again, or a result that lacks a contribution.
        """
        key = (symbols, final)
        found = self._folded.get(key)
        if found is None:
            found = self._folded[key] = self._fold(symbols, final)
        return found

    def _fold(self, symbols: tuple[int, ...], final: bool) -> int:
        element = self._element[symbols[0]]
        if any(self._element[symbol] != element for symbol in symbols):
            raise BrokenScheduleError(f"folds different elements: {self._listed(symbols)}")
        stages = {self._progress[symbol] for symbol in symbols}
        if not stages.isdisjoint(_COMPLETE):
            raise BrokenScheduleError(f"folds a result that is already complete: {self._listed(symbols)}")
        ranks = tuple(chain.from_iterable(self._ranks[symbol] for symbol in symbols))
        if len(set(ranks)) != len(ranks):
            raise BrokenScheduleError(f"counts a contribution twice: {self._listed(symbols)}")
        progress = Progress.PARTIAL
        if final:
            if len(ranks) != self.world_size:
                raise BrokenScheduleError(
                    f"calls a result final that lacks a contribution: {self._listed(symbols)}"
                )
            progress = Progress.ORDERED_RESULT if self._is_in_order(symbols) else Progress.RESULT
        elif stages == {Progress.CONTRIBUTION} and ranks in self._groups:
            progress = Progress.HOST
        self._element.append(element)
        self._ranks.append(ranks)
        self._progress.append(progress)
        return len(self._element) - 1

    def _is_in_order(self, symbols: tuple[int, ...]) -> bool:
        """Return whether a last fold takes all groups in order, each of them one fold in rank order.

        Partial results may have been rounded, so it matters which there were.
        """
        return len(symbols) == len(self._groups) and all(
            self._ranks[symbol] == group
            and self._progress[symbol] is (Progress.CONTRIBUTION if len(group) == 1 else Progress.HOST)
            for symbol, group in zip(symbols, self._groups, strict=True)
        )

    def is_result(self, symbol: int, element: int, ordered: bool) -> bool:
        """Return whether a symbol is the complete result of an element (in rank order, if asked)."""
        if symbol == UNDEFINED or self._element[symbol] != element:
            return False
        progress = self._progress[symbol]
        if self.world_size == 1 and progress is Progress.CONTRIBUTION:
            return True
        return progress is Progress.ORDERED_RESULT or (progress is Progress.RESULT and not ordered)

    def _listed(self, symbols: Sequence[int]) -> str:
        return "; ".join(map(self.describe, symbols))
