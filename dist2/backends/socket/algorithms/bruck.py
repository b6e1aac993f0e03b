"""Bruck's all-gather: ``ceil(log2 W)`` rounds for any world size; each doubles the parts that a rank has.

Parts are kept in scratch, the own one first, and turned into rank order at the end. Few messages: for
short parts.

Source: J. Bruck, C. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997).
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.hosts import folding_groups
from dist2.backends.socket.algorithms.schedule import Copy, Schedule, Step
from dist2.backends.socket.algorithms.spans import (
    assemble,
    exchange,
    fold_in_order,
    offsets_of,
    scratch,
    source,
    target,
)


def all_gather(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Gather parts of all ranks, which may differ in length."""
    bounds = offsets_of(counts)
    total = bounds[-1]
    steps = _gather_turned(rank, world_size, counts)
    behind = total - bounds[rank]  # elements of this rank's part and the later ones, which lie first
    steps.append(Copy(target(bounds[rank], total), scratch(0, behind)))
    steps.append(Copy(target(0, bounds[rank]), scratch(behind, total)))
    return assemble(steps, scratch=total)


def all_reduce(rank: int, world_size: int, numel: int, layout: tuple[int, ...] = ()) -> Schedule:
    """Gather the whole vectors of all ranks and fold them in order everywhere."""
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    steps = _gather_turned(rank, world_size, [numel] * world_size)
    places = ((peer - rank) % world_size * numel for peer in range(world_size))
    arrived = [scratch(place, place + numel) for place in places]
    folds = fold_in_order(target(0, numel), arrived, folding_groups(layout, world_size))
    return assemble([*steps, *folds], scratch=world_size * numel)


def _gather_turned(rank: int, world_size: int, counts: Sequence[int]) -> list[Step]:
    """Gather into scratch the parts of this rank, the next one, and so on around."""
    turned = offsets_of([counts[(rank + distance) % world_size] for distance in range(world_size)])
    steps: list[Step] = [Copy(scratch(0, counts[rank]), source(0, counts[rank]))]
    known = 1
    while known < world_size:
        more = min(known, world_size - known)
        steps.append(
            exchange(
                (rank - known) % world_size,
                scratch(0, turned[more]),
                (rank + known) % world_size,
                scratch(turned[known], turned[known + more]),
            )
        )
        known += more
    return steps
