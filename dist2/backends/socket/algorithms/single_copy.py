"""Collectives that copy nothing into shared memory: ranks read and write each other's tensors.

Each rank lends its caller's memory between two fences. What is folded is folded straight out of the
tensors of all ranks; what moves moves once. Work is spread so that all ranks copy or fold the same
amount, also where a root gives or takes everything. All fold in rank order.

How a rank reaches another's memory is not their concern: it may be mapped (`dist2.shared_empty`), or
read and written by the kernel. Source of the idea: "cross-memory attach" of MPI libraries, e.g. Goglin
and Moreaud 2013 (KNEM).
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


def all_reduce(rank: int, world_size: int, numel: int, piece: int) -> Schedule:
    """Fold the own chunk out of all tensors and write it to all of them: two fences.

    It goes piece by piece, so that what was folded is still in the cache when it is written to the others.
    Writing keeps a chunk of all tensors in the cache of one core; if the others fetched it, each line of it
    would change hands once more.

    Args:
        rank: The rank that the schedule is for.
        world_size: How many ranks there are.
        numel: Elements of the vector.
        piece: Elements to fold at a time.
    """
    steps: list[Step] = [Copy(target(0, numel), source(0, numel))]
    if world_size == 1:
        return assemble(steps)
    bounds = chunk_bounds(numel, world_size)
    steps.append(Fence())
    for low in range(bounds[rank], bounds[rank + 1], piece):
        high = min(low + piece, bounds[rank + 1])
        pieces = [lent(owner, 0, low, high) for owner in range(world_size)]
        pieces[rank] = target(low, high)
        steps.append(Fold(target(low, high), tuple(pieces)))
        steps += [Copy(lent(peer, 0, low, high), target(low, high)) for peer in peers_after(rank, world_size)]
    return assemble([*steps, Fence()], lends=Buffer.OUTPUT)


def reduce(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Fold one chunk each, straight into the root's tensor: two fences."""
    steps: list[Step] = []
    if rank == root:
        steps.append(Copy(target(0, numel), source(0, numel)))
    if world_size == 1:
        return assemble(steps)
    bounds = chunk_bounds(numel, world_size)
    low, high = bounds[rank], bounds[rank + 1]
    pieces = [lent(owner, 0, low, high) for owner in range(world_size)]
    pieces[rank] = target(low, high) if rank == root else source(low, high)
    result = target(low, high) if rank == root else lent(root, 0, low, high)
    steps += [Fence(), Fold(result, tuple(pieces)), Fence()]
    return assemble(steps, lends=Buffer.OUTPUT if rank == root else Buffer.INPUT)


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
    """Copy the vector out of the root's tensor, save for one chunk that the root copies to all."""
    own = Copy(target(0, numel), source(0, numel))
    if world_size == 1:
        return assemble([own])
    bounds = chunk_bounds(numel, world_size)
    low, high = bounds[root], bounds[root + 1]
    steps: list[Step] = [Fence()]
    if rank == root:
        peers = peers_after(root, world_size)
        steps += [Copy(lent(peer, 0, low, high), source(low, high)) for peer in peers]
        return assemble([*steps, own, Fence()], lends=Buffer.INPUT)
    rest = ((0, low), (high, numel))
    steps += [Copy(target(start, stop), lent(root, 0, start, stop)) for start, stop in rest]
    return assemble([*steps, Fence()], lends=Buffer.OUTPUT)


def all_gather(rank: int, world_size: int, counts: Sequence[int], whole: int) -> Schedule:
    """Copy each part out of its owner's tensor; an own part of ``whole`` elements or more in one go."""
    bounds = offsets_of(counts)
    copies = [
        Copy(target(bounds[peer], bounds[peer + 1]), lent(peer, 0, 0, counts[peer]))
        for peer in peers_after(rank, world_size)
    ]
    return _around(world_size, bounds[rank], 0, counts[rank], copies, whole)


def gather(rank: int, world_size: int, counts: Sequence[int], root: int, helped: int) -> Schedule:
    """Copy this rank's part into the root's tensor; the root itself copies the end of each part.

    The root copies its own part as well, which takes about half as long as the kernel takes for another's.

    Args:
        rank: The rank that the schedule is for.
        world_size: How many ranks there are.
        counts: Elements of each part.
        root: The rank that gathers them.
        helped: The least that the root copies of a part, in elements for each of the other ranks.
    """
    part = source(0, counts[rank])
    cuts = _cuts(world_size, counts, helped)
    if rank != root:
        cut = cuts[rank]
        lends = Buffer.INPUT if cut < counts[rank] else None
        return assemble([Fence(), Copy(lent(root, rank, 0, cut), source(0, cut)), Fence()], lends=lends)
    bounds = offsets_of(counts)
    own = Copy(target(bounds[rank], bounds[rank + 1]), part)
    if world_size == 1:
        return assemble([own])
    ends = [
        Copy(target(bounds[peer] + cuts[peer], bounds[peer + 1]), lent(peer, 0, cuts[peer], counts[peer]))
        for peer in peers_after(root, world_size)
    ]
    return assemble([Fence(), *ends, own, Fence()], lends=Buffer.OUTPUT)


def scatter(rank: int, world_size: int, counts: Sequence[int], root: int, helped: int) -> Schedule:
    """Copy this rank's part out of the root's tensor; the root copies the end of each part: see `gather`."""
    part = target(0, counts[rank])
    cuts = _cuts(world_size, counts, helped)
    if rank != root:
        cut = cuts[rank]
        lends = Buffer.OUTPUT if cut < counts[rank] else None
        return assemble([Fence(), Copy(target(0, cut), lent(root, rank, 0, cut)), Fence()], lends=lends)
    bounds = offsets_of(counts)
    own = Copy(part, source(bounds[rank], bounds[rank + 1]))
    if world_size == 1:
        return assemble([own])
    ends = [
        Copy(lent(peer, 0, cuts[peer], counts[peer]), source(bounds[peer] + cuts[peer], bounds[peer + 1]))
        for peer in peers_after(root, world_size)
    ]
    return assemble([Fence(), *ends, own, Fence()], lends=Buffer.INPUT)


def _cuts(world_size: int, counts: Sequence[int], helped: int) -> list[int]:
    """Return from which element on the root copies each part, so that all ranks take equally long."""
    ends = [count // (2 * world_size) for count in counts]
    least = helped * (world_size - 1)
    return [count - end if end >= least else count for count, end in zip(counts, ends, strict=True)]


def all_to_all(
    rank: int, world_size: int, sent: Sequence[int], received: Sequence[int], whole: int
) -> Schedule:
    """Copy the own part out of each other rank's tensor: two fences. No rank knows what others exchange.

    Args:
        rank: The rank that the schedule is for.
        world_size: How many ranks there are.
        sent: Elements for each rank.
        received: Elements from each rank.
        whole: From so many elements on, what a rank sends itself is copied in one go.
    """
    outgoing, incoming = offsets_of(sent), offsets_of(received)
    copies = [
        Copy(target(incoming[peer], incoming[peer + 1]), lent(peer, rank, 0, received[peer]))
        for peer in peers_after(rank, world_size)
    ]
    return _around(world_size, incoming[rank], outgoing[rank], sent[rank], copies, whole)


def _around(world_size: int, to: int, start: int, numel: int, copies: Sequence[Step], whole: int) -> Schedule:
    """Do copies between two fences; the own part is copied while others come to a fence.

    It is copied in two halves, one at each fence, unless it is so long that libc would go past the cache with
    all of it, and not with a half.

    Args:
        world_size: How many ranks there are.
        to: Where in the output the own part belongs.
        start: Where in the input it is.
        numel: Elements of it.
        copies: The copies of the others' parts.
        whole: From so many elements on it is copied in one go.
    """
    cut = numel if numel >= whole else numel // 2
    first = Copy(target(to, to + cut), source(start, start + cut))
    second = [] if cut == numel else [Copy(target(to + cut, to + numel), source(start + cut, start + numel))]
    if world_size == 1:
        return assemble([first, *second])
    return assemble([first, Fence(), *copies, *second, Fence()], lends=Buffer.INPUT)
