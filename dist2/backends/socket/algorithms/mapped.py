"""Collectives that copy nothing into shared memory: ranks read each other's tensors, which are mapped.

Each rank exposes its caller's memory between its first fence and its last. Reductions read the tensors of all
ranks directly, other operations copy each element once. All fold in rank order.

Only its owner writes a tensor. A rank can be stopped at any instruction, for any time; if it wrote to
another's memory when it continues, that memory might be in other use, because its owner's call may have
raised meanwhile. A read that comes too late does no harm: the last fence shows it (`Recall.check`), and the
call raises.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.schedule import (
    Buffer,
    Copy,
    Fence,
    Fold,
    Schedule,
    Step,
    chunk_bounds,
)
from dist2.backends.socket.algorithms.spans import assemble, lent, offsets_of, peers_after, source, target


def all_reduce(rank: int, world_size: int, numel: int) -> Schedule:
    """Fold the own chunk out of all tensors, then copy the other chunks out of them: three fences."""
    own = Copy(target(0, numel), source(0, numel))
    if world_size == 1:
        return assemble([own])
    bounds = chunk_bounds(numel, world_size)
    low, high = bounds[rank], bounds[rank + 1]
    pieces = [lent(owner, 0, low, high) for owner in range(world_size)]
    pieces[rank] = target(low, high)
    results = [
        Copy(target(bounds[peer], bounds[peer + 1]), lent(peer, 0, bounds[peer], bounds[peer + 1]))
        for peer in peers_after(rank, world_size)
    ]
    steps: list[Step] = [own, Fence(), Fold(target(low, high), tuple(pieces)), Fence(), *results, Fence()]
    return assemble(steps, lends=Buffer.OUTPUT)


def reduce(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Fold all tensors into the root's: two fences. The root does it alone."""
    if rank != root:
        return assemble([Fence(), Fence()], lends=Buffer.INPUT)
    own = Copy(target(0, numel), source(0, numel))
    if world_size == 1:
        return assemble([own])
    pieces = [lent(owner, 0, 0, numel) for owner in range(world_size)]
    pieces[rank] = target(0, numel)
    return assemble([own, Fence(), Fold(target(0, numel), tuple(pieces)), Fence()])


def reduce_scatter(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Fold the own part out of all tensors: two fences."""
    bounds = offsets_of(counts)
    count = counts[rank]
    own = source(bounds[rank], bounds[rank + 1])
    if world_size == 1:
        return assemble([Copy(target(0, count), own)])
    pieces = [lent(owner, rank, 0, count) for owner in range(world_size)]
    pieces[rank] = own
    return assemble([Fence(), Fold(target(0, count), tuple(pieces)), Fence()], lends=Buffer.INPUT)


def broadcast(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Copy the vector out of the root's tensor: two fences."""
    own = Copy(target(0, numel), source(0, numel))
    if world_size == 1:
        return assemble([own])
    if rank == root:
        return assemble([Fence(), own, Fence()], lends=Buffer.INPUT)
    return assemble([Fence(), Copy(target(0, numel), lent(root, 0, 0, numel)), Fence()])


def all_gather(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Copy each part out of its owner's tensor: two fences."""
    bounds = offsets_of(counts)
    copies = [
        Copy(target(bounds[peer], bounds[peer + 1]), lent(peer, 0, 0, counts[peer]))
        for peer in peers_after(rank, world_size)
    ]
    return _around(world_size, bounds[rank], 0, counts[rank], copies)


def gather(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Copy each part out of its owner's tensor into the root's: two fences. The root does it alone."""
    if rank != root:
        return assemble([Fence(), Fence()], lends=Buffer.INPUT)
    bounds = offsets_of(counts)
    own = Copy(target(bounds[rank], bounds[rank + 1]), source(0, counts[rank]))
    if world_size == 1:
        return assemble([own])
    copies = [
        Copy(target(bounds[peer], bounds[peer + 1]), lent(peer, 0, 0, counts[peer]))
        for peer in peers_after(root, world_size)
    ]
    return assemble([Fence(), *copies, own, Fence()])


def scatter(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Copy the own part out of the root's tensor: two fences."""
    part = target(0, counts[rank])
    if rank != root:
        return assemble([Fence(), Copy(part, lent(root, rank, 0, counts[rank])), Fence()])
    bounds = offsets_of(counts)
    own = Copy(part, source(bounds[rank], bounds[rank + 1]))
    if world_size == 1:
        return assemble([own])
    return assemble([Fence(), own, Fence()], lends=Buffer.INPUT)


def all_to_all(rank: int, world_size: int, sent: Sequence[int], received: Sequence[int]) -> Schedule:
    """Copy the own part out of each other rank's tensor: two fences. A rank knows its own sizes only.

    Args:
        rank: The rank that the schedule is for.
        world_size: How many ranks there are.
        sent: Elements for each rank.
        received: Elements from each rank.
    """
    outgoing, incoming = offsets_of(sent), offsets_of(received)
    copies = [
        Copy(target(incoming[peer], incoming[peer + 1]), lent(peer, rank, 0, received[peer]))
        for peer in peers_after(rank, world_size)
    ]
    return _around(world_size, incoming[rank], outgoing[rank], sent[rank], copies)


def _around(world_size: int, to: int, start: int, numel: int, copies: Sequence[Step]) -> Schedule:
    """Do copies between two fences; the own part is copied while others come to the first.

    Args:
        world_size: How many ranks there are.
        to: Where in the output the own part belongs.
        start: Where in the input it is.
        numel: Elements of it.
        copies: The copies of the others' parts.
    """
    own = Copy(target(to, to + numel), source(start, start + numel))
    if world_size == 1:
        return assemble([own])
    return assemble([own, Fence(), *copies, Fence()], lends=Buffer.INPUT)
