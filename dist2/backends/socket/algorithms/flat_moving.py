"""Moves through shared memory: each rank copies its data to its slot; after a fence, others copy it out.

Data longer than half a slot go through it in blocks, each by a schedule of its own: then a rank that
only writes fills one half while the others still read the other. Where one rank gives or takes everything,
it is the only one to be waited for, or the only one to wait: the others go on to the next block or
operation.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.schedule import Copy, Fence, Schedule, Step
from dist2.backends.socket.algorithms.spans import assemble, offsets_of, peers_after, slot, source, target


def broadcast(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Copy the vector from the root's slot."""
    steps: list[Step] = []
    if rank == root:
        # The root's own copy comes last: no rank waits for it.
        if world_size > 1:
            steps += [Copy(slot(root, 0, numel), source(0, numel)), Fence(awaited=())]
        steps.append(Copy(target(0, numel), source(0, numel)))
    else:
        steps += [Fence(awaited=(root,)), Copy(target(0, numel), slot(root, 0, numel))]
    return assemble(steps, slot=numel if world_size > 1 else 0, streams=True)


def all_gather(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Copy each part from its owner's slot."""
    return _collect(rank, world_size, counts, range(world_size))


def gather(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Copy each part from its owner's slot, at the root."""
    return _collect(rank, world_size, counts, (root,))


def scatter(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Copy the own part from the root's slot."""
    bounds = offsets_of(counts)
    low, high = bounds[rank], bounds[rank + 1]
    steps: list[Step] = []
    if rank == root:
        if world_size > 1:
            for start, stop in ((0, low), (high, bounds[-1])):
                steps.append(Copy(slot(root, start, stop), source(start, stop)))
            steps.append(Fence(awaited=()))
        steps.append(Copy(target(0, high - low), source(low, high)))
    else:
        steps += [Fence(awaited=(root,)), Copy(target(0, high - low), slot(root, low, high))]
    return assemble(steps, slot=bounds[-1] if world_size > 1 else 0, streams=True)


def all_to_all(rank: int, sent: Sequence[int], received: Sequence[int], stride: int) -> Schedule:
    """Copy each part to its place in the own slot, fence, copy the own parts out of the others' slots.

    Each rank knows only its own sizes, so places are at a stride that is the same on all ranks.

    Args:
        rank: The rank that the schedule is for.
        sent: Elements for each rank.
        received: Elements from each rank.
        stride: Elements between the places of two parts; no part is longer.
    """
    world_size = len(sent)
    outgoing, incoming = offsets_of(sent), offsets_of(received)
    own = Copy(target(incoming[rank], incoming[rank + 1]), source(outgoing[rank], outgoing[rank + 1]))
    if world_size == 1:
        return assemble([own])
    steps: list[Step] = []
    for peer in range(world_size):
        if peer != rank:
            place = slot(rank, peer * stride, peer * stride + sent[peer])
            steps.append(Copy(place, source(outgoing[peer], outgoing[peer + 1])))
    steps += [own, Fence()]
    for peer in peers_after(rank, world_size):
        place = slot(peer, rank * stride, rank * stride + received[peer])
        steps.append(Copy(target(incoming[peer], incoming[peer + 1]), place))
    return assemble(steps, slot=world_size * stride)


def barrier(rank: int, world_size: int) -> Schedule:
    """Return when all ranks have called."""
    return Schedule((Fence(),) if world_size > 1 else ())


def _collect(rank: int, world_size: int, counts: Sequence[int], collecting: Sequence[int]) -> Schedule:
    """Copy each part from its owner's slot, on the ranks that collect."""
    bounds = offsets_of(counts)
    own = Copy(target(bounds[rank], bounds[rank + 1]), source(0, counts[rank]))
    if world_size == 1:
        return assemble([own])
    streams = len(collecting) < world_size
    steps: list[Step] = []
    if set(collecting) != {rank}:
        steps.append(Copy(slot(rank, 0, counts[rank]), source(0, counts[rank])))
    if not streams:
        steps.append(own)  # while it is in the cache, and others are on their way
    steps.append(Fence() if rank in collecting else Fence(awaited=()))
    if rank in collecting:
        steps += [
            Copy(target(bounds[peer], bounds[peer + 1]), slot(peer, 0, counts[peer]))
            for peer in peers_after(rank, world_size)
        ]
        steps += [own] if streams else []
    return assemble(steps, slot=max(counts), streams=streams)
