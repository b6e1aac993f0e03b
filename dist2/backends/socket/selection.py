# cython: annotation_typing=False
"""Selection of the algorithm of an operation: by size, from measured constants.

    request = Request(OpKind.ALL_REDUCE, world_size, (numel,), itemsize=4, slot_bytes=slot_bytes)
    algorithm = select(request)
    schedule = algorithm.schedule(rank, request)

Everything a choice depends on is equal on all ranks, so that all choose alike.
"""

from __future__ import annotations

from collections.abc import Callable

from dist2.backends.socket.algorithms.registry import (
    ALGORITHMS,
    MAPPED,
    Algorithm,
    algorithms_for,
)
from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Row, Thresholds, column
from dist2.errors import InvalidUsageError
from dist2.operation.kinds import OpKind

__all__ = ["DEFAULT_THRESHOLDS", "Algorithm", "Request", "Thresholds", "algorithms_for", "select"]


def select(request: Request, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Algorithm:
    """Return the algorithm to run.

    Raises:
        InvalidUsageError: The forced one is unknown or unfit; the message lists the fit ones.
    """
    if request.forced is None:
        if _may_be_mapped(request, thresholds):
            return ALGORITHMS[request.family, MAPPED]
        return ALGORITHMS[request.family, _CHOICES[request.family](request, thresholds)]
    forced = ALGORITHMS.get((request.family, request.forced))
    if forced is None or not forced.fits(request):
        fit = ", ".join(each.name for each in algorithms_for(request.kind) if each.fits(request))
        reason = "is unknown" if forced is None else "does not fit"
        raise InvalidUsageError(
            f"algorithm={request.forced!r} {reason} for {request.kind.value}; suitable: {fit}"
        )
    return forced


def _may_be_mapped(request: Request, limits: Thresholds) -> bool:
    """Return whether tensors are long enough to find out whether all of them are mapped."""
    mapped = ALGORITHMS.get((request.family, MAPPED))
    if mapped is None or not request.lends or not mapped.fits(request):
        return False
    row: Row = getattr(limits, f"{request.family.value}_mapped_bytes")
    return _nbytes(request) >= row[column(request.world_size)]


def _all_reduce(request: Request, limits: Thresholds) -> str:
    nbytes, world_size = _nbytes(request), request.world_size
    if request.is_flat:
        return "one_shot" if nbytes <= limits.one_shot_bytes[column(world_size)] else "two_shot"
    if request.is_hierarchical:
        return "hosts_whole" if _sent_twice(request) <= limits.whole_bytes else "hosts_direct"
    crowded = world_size > limits.crowd
    if request.any_order and nbytes <= limits.doubling_bytes and request.is_paired and world_size > 2:
        return "doubling"
    if _sent_twice(request) <= limits.whole_bytes:
        return "bruck" if crowded else "whole"
    if not crowded or not request.any_order:
        return "direct"
    return "halving" if request.is_paired else "ring"


def _reduce(request: Request, limits: Thresholds) -> str:
    if request.is_flat:
        most = limits.one_shot_reduce_bytes[column(request.world_size)]
        return "one_shot" if _nbytes(request) <= most else "two_shot"
    if request.is_hierarchical:
        return "hosts"
    return "direct" if _sent_twice(request) > limits.whole_reduce_bytes else "whole"


def _reduce_scatter(request: Request, limits: Thresholds) -> str:
    if request.is_flat:
        return "flat"
    return "hosts" if request.is_hierarchical else "direct"


def _broadcast(request: Request, limits: Thresholds) -> str:
    if request.is_flat:
        return "flat"
    if request.is_hierarchical:
        return "hosts_tree" if _nbytes(request) <= limits.short_bytes else "hosts"
    # Down a tree of two levels the root sends the vector twice, as in van de Geijn's algorithm.
    is_long = _nbytes(request) > limits.tree_bytes and request.world_size > 4
    return "van_de_geijn" if is_long else "binomial"


def _all_gather(request: Request, limits: Thresholds) -> str:
    if request.is_flat:
        return "flat"
    if request.is_hierarchical:
        return "hosts"
    if request.world_size <= limits.crowd:
        return "direct"
    return "bruck" if _nbytes(request) <= limits.short_bytes else "ring"


def _rooted_parts(request: Request, limits: Thresholds) -> str:
    if request.is_flat:
        return "flat"
    is_short = _nbytes(request) <= limits.short_bytes
    return "binomial" if is_short and request.world_size > limits.crowd else "direct"


def _all_to_all(request: Request, limits: Thresholds) -> str:
    # Sizes must not count: each rank knows its own alone.
    if request.is_flat:
        return "flat"
    return "pairwise" if request.world_size > limits.crowd else "direct"


def _barrier(request: Request, limits: Thresholds) -> str:
    if request.is_hierarchical:
        return "hosts"
    return "flat" if request.is_flat else "dissemination"


_CHOICES: dict[OpKind, Callable[[Request, Thresholds], str]] = {
    OpKind.ALL_REDUCE: _all_reduce,
    OpKind.REDUCE: _reduce,
    OpKind.REDUCE_SCATTER: _reduce_scatter,
    OpKind.BROADCAST: _broadcast,
    OpKind.ALL_GATHER: _all_gather,
    OpKind.GATHER: _rooted_parts,
    OpKind.SCATTER: _rooted_parts,
    OpKind.ALL_TO_ALL: _all_to_all,
    OpKind.BARRIER: _barrier,
}


def _nbytes(request: Request) -> int:
    return sum(request.counts) * request.itemsize


def _sent_twice(request: Request) -> int:
    """Return the extra bytes of a rank if all send whole vectors, and the cost of folding them."""
    nbytes = _nbytes(request)
    senders = request.hosts.count if request.is_hierarchical else request.world_size
    if request.is_hierarchical and senders == 2:
        return 0  # two hosts send as much either way, and each folds on all its cores
    return nbytes * (senders - 1) * (senders - 2) // senders + nbytes // 8
