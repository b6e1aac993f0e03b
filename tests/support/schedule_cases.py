"""Requests and schedules of every algorithm, for the tests that prove, break and run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import pytest

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.selection import Algorithm, algorithms_for
from dist2.operation.kinds import OpKind

FAMILIES = (
    OpKind.ALL_REDUCE,
    OpKind.REDUCE,
    OpKind.REDUCE_SCATTER,
    OpKind.BROADCAST,
    OpKind.ALL_GATHER,
    OpKind.GATHER,
    OpKind.SCATTER,
    OpKind.ALL_TO_ALL,
    OpKind.BARRIER,
)
EVERY = [algorithm for family in FAMILIES for algorithm in algorithms_for(family)]
ALGORITHMS = [algorithm for algorithm in EVERY if not algorithm.hierarchical]
"""Those for ranks whose hosts do not matter."""
HIERARCHICAL = [algorithm for algorithm in EVERY if algorithm.hierarchical]
FLAT = [algorithm for algorithm in ALGORITHMS if algorithm.flat]

_USUAL = (*range(1, 18), 24, 32, 33, 64)
_OTHERS = tuple(size for size in (*range(18, 34), *range(38, 63, 6), 63) if size not in _USUAL)
WORLD_SIZES = [
    pytest.param(_USUAL, id="usual"),
    pytest.param(_OTHERS, id="others", marks=pytest.mark.exhaustive),
]
"""Parameters of a test: world sizes to 17, about powers of two, and 64; for `make test-all` the others.

Beyond 33 these are every sixth. A proof takes longer the more ranks there are.
"""


def algorithm_named(family: OpKind, name: str) -> Algorithm:
    return next(each for each in algorithms_for(family) if each.name == name)


def worlds_of(algorithm: Algorithm, world_sizes: Iterable[int]) -> list[int]:
    """Return the world sizes that an algorithm is for."""
    return [size for size in world_sizes if not algorithm.paired or size.bit_count() == 1]


def name_of(algorithm: Algorithm) -> str:
    return f"{algorithm.family.value}-{algorithm.name}"


def requests_for(algorithm: Algorithm, world_size: int, size: int) -> list[Request]:
    """Ask for an operation of about ``size`` elements, cut unevenly where parts may be uneven."""
    family = algorithm.family
    common = Request(
        family,
        world_size,
        (size,),
        root=(5 * size + 3) % world_size,
        exact=not algorithm.ordered,
        slot_bytes=10 * world_size + size,
    )
    if family in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.BARRIER):
        return [common] * world_size
    if family is not OpKind.ALL_TO_ALL:
        counts = tuple((5 * rank + size) % 4 for rank in range(world_size))
        return [attrs.evolve(common, counts=counts)] * world_size
    matrix = tuple(
        tuple((3 * src + 5 * dst + size) % 4 for dst in range(world_size)) for src in range(world_size)
    )
    return [
        attrs.evolve(common, counts=matrix[rank], received=tuple(row[rank] for row in matrix))
        for rank in range(world_size)
    ]


def schedules_of(algorithm: Algorithm, requests: Sequence[Request]) -> list[Schedule]:
    return [algorithm.schedule(rank, request) for rank, request in enumerate(requests)]
