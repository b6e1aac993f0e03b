"""All algorithms by operation and name: a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from dist2.backends.socket.algorithms import (
    binomial,
    bruck,
    direct,
    doubling,
    flat_moving,
    flat_reducing,
    hosts_moving,
    hosts_reducing,
    mapped,
    ring,
    van_de_geijn,
)
from dist2.backends.socket.algorithms.request import Request, family_of
from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.operation.kinds import OpKind


@attrs.frozen(eq=False)
class Algorithm:
    """One line of the registry.

    Attributes:
        name: How users force it; unique in its family.
        family: The operation it is for, in all its spellings.
        build: Makes the schedule of a rank.
        flat: It runs on shared memory, not on messages.
        lends: It is flat; ranks read each other's tensors where all are mapped, otherwise another one runs.
        hierarchical: It uses both: shared memory inside hosts, messages between them.
        ordered: It folds in rank order or not at all, so that inexact reductions may use it.
        paired: Its ranks exchange in pairs, so they are a power of two.
        streams: It is flat, and not all ranks wait for all: its blocks go through pieces of slots.
    """

    name: str
    family: OpKind
    build: Callable[[int, Request], Schedule]
    flat: bool = False
    lends: bool = False
    hierarchical: bool = False
    ordered: bool = True
    paired: bool = False
    streams: bool = False

    def schedule(self, rank: int, request: Request) -> Schedule:
        """Return the schedule of ``rank``."""
        return self.build(rank, request)

    def fits(self, request: Request) -> bool:
        """Return whether it can serve a request at all."""
        if request.family is not self.family or not (self.ordered or request.any_order):
            return False
        if self.paired and not request.is_paired:
            return False
        # A slot must hold at least an element of each part.
        if self.hierarchical:
            return request.is_hierarchical
        if self.lends and request.world_size > MOST_EXPOSED:
            return False
        return not self.flat or request.is_flat


_Build = Callable[[int, Request], Schedule]


def _vector(make: Callable[[int, int, int], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.world_size, request.counts[0])


def _rooted(make: Callable[[int, int, int, int], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.world_size, request.counts[0], request.root)


def _parts(make: Callable[[int, int, tuple[int, ...]], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.world_size, request.counts)


def _rooted_parts(make: Callable[[int, int, tuple[int, ...], int], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.world_size, request.counts, request.root)


def _pairs(make: Callable[[int, int, tuple[int, ...], tuple[int, ...]], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.world_size, request.counts, request.received)


def _flat_pairs(rank: int, request: Request) -> Schedule:
    stride = request.capacity // request.world_size
    return flat_moving.all_to_all(rank, request.counts, request.received, stride)


def _direct_all_reduce(rank: int, request: Request) -> Schedule:
    numel, limit = request.counts[0], request.pass_numel
    return direct.all_reduce(rank, request.world_size, numel, limit, request.layout)


def _direct_reduce(rank: int, request: Request) -> Schedule:
    numel, limit = request.counts[0], request.pass_numel
    return direct.reduce(rank, request.world_size, numel, request.root, limit, request.layout)


def _direct_reduce_scatter(rank: int, request: Request) -> Schedule:
    limit = request.pass_numel
    return direct.reduce_scatter(rank, request.world_size, request.counts, limit, request.layout)


def _whole_reduce(rank: int, request: Request) -> Schedule:
    return direct.reduce_whole(rank, request.world_size, request.counts[0], request.root, request.layout)


def _ordered_vector(make: Callable[[int, int, int, tuple[int, ...]], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.world_size, request.counts[0], request.layout)


def _hosts_vector(make: Callable[[int, tuple[int, ...], int, int, int], Schedule]) -> _Build:
    return lambda rank, request: make(
        rank, request.layout, request.counts[0], request.capacity, request.piece_numel
    )


def _hosts_parts(make: Callable[[int, tuple[int, ...], tuple[int, ...], int], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.layout, request.counts, request.capacity)


def _hosts_reduce(rank: int, request: Request) -> Schedule:
    numel, capacity, piece = request.counts[0], request.capacity, request.piece_numel
    return hosts_reducing.reduce(rank, request.layout, numel, capacity, piece, request.root)


def _hosts_broadcast(make: Callable[[int, tuple[int, ...], int, int, int], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.layout, request.counts[0], request.root, request.capacity)


def _hosts_barrier(rank: int, request: Request) -> Schedule:
    return hosts_moving.barrier(rank, request.layout)


def _apart_barrier(rank: int, request: Request) -> Schedule:
    return hosts_moving.barrier(rank, tuple(range(request.world_size)))


def _nothing(make: Callable[[int, int], Schedule]) -> _Build:
    return lambda rank, request: make(rank, request.world_size)


def _mapped(family: OpKind, build: _Build) -> Algorithm:
    return Algorithm(MAPPED, family, build, flat=True, lends=True)


def _paired(name: str, make: Callable[[int, int, int], Schedule]) -> Algorithm:
    return Algorithm(name, OpKind.ALL_REDUCE, _vector(make), ordered=False, paired=True)


MAPPED = "mapped"
MOST_EXPOSED = 256
"""Ranks up to which tensors are read in place: a rank exposes a part for each; a table has room for 313."""
_REDUCE_SCATTER = OpKind.REDUCE_SCATTER
_REGISTRY = (
    Algorithm("one_shot", OpKind.ALL_REDUCE, _vector(flat_reducing.all_reduce_one_shot), flat=True),
    Algorithm("two_shot", OpKind.ALL_REDUCE, _vector(flat_reducing.all_reduce_two_shot), flat=True),
    _mapped(OpKind.ALL_REDUCE, _vector(mapped.all_reduce)),
    Algorithm("whole", OpKind.ALL_REDUCE, _ordered_vector(direct.all_reduce_whole)),
    Algorithm("bruck", OpKind.ALL_REDUCE, _ordered_vector(bruck.all_reduce)),
    Algorithm("direct", OpKind.ALL_REDUCE, _direct_all_reduce),
    _paired("doubling", doubling.all_reduce_doubling),
    _paired("halving", doubling.all_reduce_halving),
    Algorithm("ring", OpKind.ALL_REDUCE, _vector(ring.all_reduce), ordered=False),
    Algorithm(
        "hosts_whole", OpKind.ALL_REDUCE, _hosts_vector(hosts_reducing.all_reduce_whole), hierarchical=True
    ),
    Algorithm(
        "hosts_direct", OpKind.ALL_REDUCE, _hosts_vector(hosts_reducing.all_reduce_direct), hierarchical=True
    ),
    Algorithm("one_shot", OpKind.REDUCE, _rooted(flat_reducing.reduce_one_shot), flat=True, streams=True),
    Algorithm("two_shot", OpKind.REDUCE, _rooted(flat_reducing.reduce_two_shot), flat=True),
    _mapped(OpKind.REDUCE, _rooted(mapped.reduce)),
    Algorithm("whole", OpKind.REDUCE, _whole_reduce),
    Algorithm("direct", OpKind.REDUCE, _direct_reduce),
    Algorithm("hosts", OpKind.REDUCE, _hosts_reduce, hierarchical=True),
    Algorithm("flat", _REDUCE_SCATTER, _parts(flat_reducing.reduce_scatter), flat=True),
    _mapped(_REDUCE_SCATTER, _parts(mapped.reduce_scatter)),
    Algorithm("direct", _REDUCE_SCATTER, _direct_reduce_scatter),
    Algorithm("hosts", _REDUCE_SCATTER, _hosts_parts(hosts_reducing.reduce_scatter), hierarchical=True),
    Algorithm("flat", OpKind.BROADCAST, _rooted(flat_moving.broadcast), flat=True, streams=True),
    _mapped(OpKind.BROADCAST, _rooted(mapped.broadcast)),
    Algorithm("binomial", OpKind.BROADCAST, _rooted(binomial.broadcast)),
    Algorithm("van_de_geijn", OpKind.BROADCAST, _rooted(van_de_geijn.broadcast)),
    Algorithm("hosts", OpKind.BROADCAST, _hosts_broadcast(hosts_moving.broadcast), hierarchical=True),
    Algorithm(
        "hosts_tree", OpKind.BROADCAST, _hosts_broadcast(hosts_moving.broadcast_tree), hierarchical=True
    ),
    Algorithm("flat", OpKind.ALL_GATHER, _parts(flat_moving.all_gather), flat=True),
    _mapped(OpKind.ALL_GATHER, _parts(mapped.all_gather)),
    Algorithm("direct", OpKind.ALL_GATHER, _parts(direct.all_gather)),
    Algorithm("bruck", OpKind.ALL_GATHER, _parts(bruck.all_gather)),
    Algorithm("ring", OpKind.ALL_GATHER, _parts(ring.all_gather)),
    Algorithm("hosts", OpKind.ALL_GATHER, _hosts_parts(hosts_moving.all_gather), hierarchical=True),
    Algorithm("flat", OpKind.GATHER, _rooted_parts(flat_moving.gather), flat=True, streams=True),
    _mapped(OpKind.GATHER, _rooted_parts(mapped.gather)),
    Algorithm("direct", OpKind.GATHER, _rooted_parts(direct.gather)),
    Algorithm("binomial", OpKind.GATHER, _rooted_parts(binomial.gather)),
    Algorithm("flat", OpKind.SCATTER, _rooted_parts(flat_moving.scatter), flat=True, streams=True),
    _mapped(OpKind.SCATTER, _rooted_parts(mapped.scatter)),
    Algorithm("direct", OpKind.SCATTER, _rooted_parts(direct.scatter)),
    Algorithm("binomial", OpKind.SCATTER, _rooted_parts(binomial.scatter)),
    Algorithm("flat", OpKind.ALL_TO_ALL, _flat_pairs, flat=True),
    _mapped(OpKind.ALL_TO_ALL, _pairs(mapped.all_to_all)),
    Algorithm("direct", OpKind.ALL_TO_ALL, _pairs(direct.all_to_all)),
    Algorithm("pairwise", OpKind.ALL_TO_ALL, _pairs(direct.all_to_all_in_pairs)),
    Algorithm("flat", OpKind.BARRIER, _nothing(flat_moving.barrier), flat=True),
    Algorithm("dissemination", OpKind.BARRIER, _apart_barrier),
    Algorithm("hosts", OpKind.BARRIER, _hosts_barrier, hierarchical=True),
)
ALGORITHMS = {(algorithm.family, algorithm.name): algorithm for algorithm in _REGISTRY}
"""All algorithms by family and name."""


def algorithms_for(kind: OpKind) -> tuple[Algorithm, ...]:
    """Return all algorithms of an operation's family."""
    family = family_of(kind)
    return tuple(algorithm for algorithm in _REGISTRY if algorithm.family is family)
