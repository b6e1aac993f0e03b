"""The contract of each operation in symbols: a rank's memory before, and its required output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.spans import offsets_of
from dist2.operation.kinds import OpKind
from support.proof.symbols import UNDEFINED, BrokenScheduleError, Symbols


@attrs.frozen
class Promise:
    """One rank's side of an operation.

    Attributes:
        inputs: The symbols in its ``INPUT``.
        output_numel: Elements of its ``OUTPUT``.
        moved: For operations that move: the symbols that must be in ``OUTPUT``.
        first_reduced: For those that reduce: the element whose result must be first in ``OUTPUT``.
        shared: Where ``INPUT`` and ``OUTPUT`` start when the caller gives one memory for both; None
            where it cannot.
    """

    inputs: Sequence[int]
    output_numel: int
    moved: Sequence[int] | None = None
    first_reduced: int | None = None
    shared: tuple[int, int] | None = None

    def check(self, output: Sequence[int], symbols: Symbols, ordered: bool) -> None:
        """Check the memory that the rank ends with.

        Raises:
            BrokenScheduleError: An element breaks the contract.
        """
        if self.moved is not None and list(output) != list(self.moved):
            wrong = next(place for place, symbol in enumerate(self.moved) if output[place] != symbol)
            expected, found = symbols.describe(self.moved[wrong]), symbols.describe(output[wrong])
            raise BrokenScheduleError(f"OUTPUT[{wrong}] is {found}, not {expected}")
        if self.first_reduced is not None:
            for place, symbol in enumerate(output):
                if not symbols.is_result(symbol, self.first_reduced + place, ordered):
                    expected = f"the result of element {place}{' in rank order' if ordered else ''}"
                    raise BrokenScheduleError(
                        f"OUTPUT[{place}] is {symbols.describe(symbol)}, not {expected}"
                    )


def promises_of(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    """Return the contract of the operation for each rank; ``requests`` differ for `all_to_all` only."""
    return _PROMISES[requests[0].family](requests, symbols)


def _all_reduce(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    (numel,) = requests[0].counts
    first = symbols.number_elements(numel)
    return [
        Promise(symbols.contributions(rank, first, numel), numel, first_reduced=first, shared=(0, 0))
        for rank in range(len(requests))
    ]


def _reduce(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    (numel,), root = requests[0].counts, requests[0].root
    first = symbols.number_elements(numel)
    inputs = [symbols.contributions(rank, first, numel) for rank in range(len(requests))]
    return [
        Promise(mine, numel, first_reduced=first, shared=(0, 0)) if rank == root else Promise(mine, 0)
        for rank, mine in enumerate(inputs)
    ]


def _reduce_scatter(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    counts = requests[0].counts
    bounds = offsets_of(counts)
    first = symbols.number_elements(bounds[-1])
    return [
        Promise(
            symbols.contributions(rank, first, bounds[-1]),
            counts[rank],
            first_reduced=first + bounds[rank],
            shared=(0, bounds[rank]),
        )
        for rank in range(len(requests))
    ]


def _broadcast(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    (numel,), root = requests[0].counts, requests[0].root
    given = symbols.contributions(root, symbols.number_elements(numel), numel)
    nothing = [UNDEFINED] * numel
    return [
        Promise(given if rank == root else nothing, numel, moved=given, shared=(0, 0))
        for rank in range(len(requests))
    ]


def _all_gather(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    counts = requests[0].counts
    bounds = offsets_of(counts)
    parts = [
        symbols.contributions(rank, symbols.number_elements(count), count)
        for rank, count in enumerate(counts)
    ]
    everything = [symbol for part in parts for symbol in part]
    return [
        Promise(parts[rank], bounds[-1], moved=everything, shared=(bounds[rank], 0))
        for rank in range(len(requests))
    ]


def _gather(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    root = requests[0].root
    return [
        promise if rank == root else Promise(promise.inputs, 0)
        for rank, promise in enumerate(_all_gather(requests, symbols))
    ]


def _scatter(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    counts, root = requests[0].counts, requests[0].root
    bounds = offsets_of(counts)
    given = symbols.contributions(root, symbols.number_elements(bounds[-1]), bounds[-1])
    return [
        Promise(
            given if rank == root else [],
            count,
            moved=given[bounds[rank] : bounds[rank + 1]],
            shared=(0, bounds[rank]) if rank == root else None,
        )
        for rank, count in enumerate(counts)
    ]


def _all_to_all(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    parts = [
        [symbols.contributions(rank, symbols.number_elements(count), count) for count in request.counts]
        for rank, request in enumerate(requests)
    ]
    return [
        Promise(
            [symbol for part in parts[rank] for symbol in part],
            sum(request.received),
            moved=[symbol for row in parts for symbol in row[rank]],
        )
        for rank, request in enumerate(requests)
    ]


def _barrier(requests: Sequence[Request], symbols: Symbols) -> list[Promise]:
    return [Promise((), 0) for _ in requests]


_PROMISES: dict[OpKind, Callable[[Sequence[Request], Symbols], list[Promise]]] = {
    OpKind.ALL_REDUCE: _all_reduce,
    OpKind.REDUCE: _reduce,
    OpKind.REDUCE_SCATTER: _reduce_scatter,
    OpKind.BROADCAST: _broadcast,
    OpKind.ALL_GATHER: _all_gather,
    OpKind.GATHER: _gather,
    OpKind.SCATTER: _scatter,
    OpKind.ALL_TO_ALL: _all_to_all,
    OpKind.BARRIER: _barrier,
}
