"""Which algorithm runs an operation: a choice by size, from measured constants.

    request = Request(OpKind.ALL_REDUCE, world_size, (numel,), itemsize=4, slot_bytes=slot_bytes)
    algorithm = select(request)
    schedule = algorithm.schedule(rank, request)

Everything a choice depends on is equal on all ranks, so that all choose alike.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from dist2.backends.socket.algorithms.registry import ALGORITHMS, Algorithm, algorithms_for
from dist2.backends.socket.algorithms.request import Request
from dist2.errors import InvalidUsageError
from dist2.ops import OpKind

__all__ = ["DEFAULT_THRESHOLDS", "Algorithm", "Request", "Thresholds", "algorithms_for", "select"]


@attrs.frozen
class Thresholds:
    """Where one algorithm overtakes another: measured constants.

    Attributes:
        one_shot_bytes: Flat reductions up to this length, times ranks, fold everything everywhere.
        whole_bytes: Message reductions up to this length, times ranks, send whole vectors.
        short_bytes: What is called short otherwise: then messages count and not bytes.
        tree_bytes: Broadcasts up to this length go down a tree.
        crowd: From so many ranks on, a rank should not talk to all others at once.
    """

    one_shot_bytes: int = 64 << 10
    whole_bytes: int = 64 << 10
    short_bytes: int = 32 << 10
    tree_bytes: int = 256 << 10
    crowd: int = 16


DEFAULT_THRESHOLDS = Thresholds()


def select(request: Request, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Algorithm:
    """Return the algorithm to run.

    Raises:
        InvalidUsageError: The forced one is unknown or unfit; the message lists the fit ones.
    """
    if request.forced is None:
        return ALGORITHMS[request.family, _CHOICES[request.family](request, thresholds)]
    forced = ALGORITHMS.get((request.family, request.forced))
    if forced is None or not forced.fits(request):
        fit = ", ".join(each.name for each in algorithms_for(request.kind) if each.fits(request))
        reason = "is unknown" if forced is None else "does not fit"
        raise InvalidUsageError(
            f"algorithm={request.forced!r} {reason} for {request.kind.value}; fit are: {fit}"
        )
    return forced


def _all_reduce(request: Request, limits: Thresholds) -> str:
    if _is_flat(request):
        return "one_shot" if _spread(request) <= limits.one_shot_bytes else "two_shot"
    crowded = request.world_size > limits.crowd
    if _spread(request) <= limits.whole_bytes:
        return ("doubling" if request.any_order else "bruck") if crowded else "whole"
    if not crowded or not request.any_order:
        return "direct"
    return "halving" if _nbytes(request) <= limits.tree_bytes else "ring"


def _reduce(request: Request, limits: Thresholds) -> str:
    if _is_flat(request):
        return "one_shot" if _spread(request) <= limits.one_shot_bytes else "two_shot"
    if _spread(request) > limits.whole_bytes:
        return "direct"
    return "binomial" if request.any_order and request.world_size > limits.crowd else "whole"


def _reduce_scatter(request: Request, limits: Thresholds) -> str:
    if _is_flat(request):
        return "flat"
    is_long = _nbytes(request) > limits.short_bytes
    return "ring" if is_long and request.any_order and request.world_size > limits.crowd else "direct"


def _broadcast(request: Request, limits: Thresholds) -> str:
    if _is_flat(request):
        return "flat"
    # The tree alone moves the vector once to each rank if there is but one other.
    is_long = _nbytes(request) > limits.tree_bytes and request.world_size > 2
    return "van_de_geijn" if is_long else "binomial"


def _all_gather(request: Request, limits: Thresholds) -> str:
    if _is_flat(request):
        return "flat"
    if request.world_size <= limits.crowd:
        return "direct"
    return "bruck" if _nbytes(request) <= limits.short_bytes else "ring"


def _rooted_parts(request: Request, limits: Thresholds) -> str:
    if _is_flat(request):
        return "flat"
    is_short = _nbytes(request) <= limits.short_bytes
    return "binomial" if is_short and request.world_size > limits.crowd else "direct"


def _all_to_all(request: Request, limits: Thresholds) -> str:
    # Sizes must not count: each rank knows its own alone.
    if _is_flat(request):
        return "flat"
    return "direct" if request.world_size <= limits.crowd else "pairwise"


def _barrier(request: Request, limits: Thresholds) -> str:
    return "flat" if _is_flat(request) else "dissemination"


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


def _is_flat(request: Request) -> bool:
    """Return whether there is shared memory, and enough for an element of each rank."""
    return request.capacity >= request.world_size


def _nbytes(request: Request) -> int:
    return sum(request.counts) * request.itemsize


def _spread(request: Request) -> int:
    """Return the bytes that a rank reads of the others when all bring whole vectors."""
    return _nbytes(request) * (request.world_size - 1)
