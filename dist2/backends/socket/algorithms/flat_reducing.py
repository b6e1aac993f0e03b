"""Reductions through shared memory: copy to the own slot, fence, fold straight out of all slots.

All fold in rank order. Vectors longer than half a slot go through it in blocks, each by a schedule of
its own. Folds never write memory that they read from, whether or not the operation is in place, unless
the caller's output is the part of its input that it owns, or all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.schedule import Copy, Fence, Fold, Schedule, Step, chunk_bounds
from dist2.backends.socket.algorithms.spans import assemble, offsets_of, peers_after, slot, source, target


def all_reduce_one_shot(rank: int, world_size: int, numel: int) -> Schedule:
    """Fold everything on every rank: one fence, ``W`` reads of the vector each; for short vectors."""
    whole = source(0, numel)
    if world_size == 1:
        return assemble([Copy(target(0, numel), whole)])
    # The own contribution is read from the slot too: in place the input is about to be overwritten.
    pieces = tuple([slot(owner, 0, numel) for owner in range(world_size)])
    return assemble([Copy(slot(rank, 0, numel), whole), Fence(), Fold(target(0, numel), pieces)], slot=numel)


def all_reduce_two_shot(rank: int, world_size: int, numel: int) -> Schedule:
    """Fold one chunk each, then copy the others' results: two fences, about three passes over the vector."""
    return _two_shot(rank, world_size, numel, range(world_size))


def reduce_one_shot(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Fold everything on the root: one fence, at which the root alone waits; for short vectors."""
    whole = source(0, numel)
    if world_size == 1:
        return assemble([Copy(target(0, numel), whole)])
    if rank != root:
        steps: list[Step] = [Copy(slot(rank, 0, numel), whole), Fence(awaited=())]
    else:
        pieces = [slot(owner, 0, numel) for owner in range(world_size)]
        pieces[root] = whole
        steps = [Fence(), Fold(target(0, numel), tuple(pieces))]
    return assemble(steps, slot=numel, streams=True)


def reduce_two_shot(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Fold one chunk each; the root copies the results: two fences."""
    return _two_shot(rank, world_size, numel, (root,))


def reduce_scatter(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Copy the parts of the others to the own slot, fence, fold the own part: one fence."""
    bounds = offsets_of(counts)
    if world_size == 1:
        return assemble([Copy(target(0, bounds[1]), source(0, bounds[1]))])
    steps = _copy_of_others(rank, bounds)
    steps.append(Fence())
    low, high = bounds[rank], bounds[rank + 1]
    pieces = [slot(owner, low, high) for owner in range(world_size)]
    pieces[rank] = source(low, high)
    steps.append(Fold(target(0, high - low), tuple(pieces)))
    return assemble(steps, slot=bounds[-1])


def _two_shot(rank: int, world_size: int, numel: int, collecting: Sequence[int]) -> Schedule:
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    bounds = chunk_bounds(numel, world_size)
    steps = _copy_of_others(rank, bounds)
    steps.append(Fence())
    low, high = bounds[rank], bounds[rank + 1]
    pieces = [slot(owner, low, high) for owner in range(world_size)]
    pieces[rank] = source(low, high)
    mine = target(low, high) if rank in collecting else slot(rank, low, high)
    steps.append(Fold(mine, tuple(pieces)))
    if rank in collecting and len(collecting) > 1:
        # Not the fold but a copy: into a slot whose readers are far, it goes past the caches.
        steps.append(Copy(slot(rank, low, high), mine))
    steps.append(Fence())
    if rank in collecting:
        for owner in peers_after(rank, world_size):
            low, high = bounds[owner], bounds[owner + 1]
            steps.append(Copy(target(low, high), slot(owner, low, high)))
    return assemble(steps, slot=numel)


def _copy_of_others(rank: int, bounds: Sequence[int]) -> list[Step]:
    """Copy the parts that others own to the same place in the own slot."""
    before, after, end = bounds[rank], bounds[rank + 1], bounds[-1]
    return [
        Copy(slot(rank, 0, before), source(0, before)),
        Copy(slot(rank, after, end), source(after, end)),
    ]
