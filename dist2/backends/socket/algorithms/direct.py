"""Direct algorithms: every rank exchanges with every other at once.

They send as many bytes as a ring does, in one or two rounds of ``W-1`` messages. What is reduced
travels *unreduced* to the rank that owns it, which folds it in rank order: so the result depends
neither on the chunk nor on the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dist2.backends.socket.algorithms.schedule import (
    Copy,
    Exchange,
    Fold,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
    chunk_bounds,
)
from dist2.backends.socket.algorithms.spans import (
    assemble,
    offsets_of,
    peers_after,
    scratch,
    source,
    target,
)


def all_reduce(rank: int, world_size: int, numel: int) -> Schedule:
    """Send each chunk to its owner, who folds it and sends the result to all."""
    bounds = chunk_bounds(numel, world_size)
    mine = target(bounds[rank], bounds[rank + 1])
    steps = _fold_own(rank, world_size, bounds, mine)
    steps.append(_share(rank, world_size, bounds, mine))
    return assemble(steps, scratch=(world_size - 1) * mine.numel)


def reduce_scatter(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Send each part to its owner, who folds it."""
    steps = _fold_own(rank, world_size, offsets_of(counts), target(0, counts[rank]))
    return assemble(steps, scratch=(world_size - 1) * counts[rank])


def reduce(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Send each chunk to its owner, who folds it and sends the result to the root."""
    bounds = chunk_bounds(numel, world_size)
    low, high = bounds[rank], bounds[rank + 1]
    if rank == root:
        steps = _fold_own(rank, world_size, bounds, target(low, high))
        peers = peers_after(rank, world_size)
        steps.append(Exchange(recvs=tuple(Recv(peer, target(*bounds[peer : peer + 2])) for peer in peers)))
        return assemble(steps, scratch=(world_size - 1) * (high - low))
    others = (world_size - 1) * (high - low)
    result = scratch(others, others + high - low)
    steps = _fold_own(rank, world_size, bounds, result)
    steps.append(Exchange(sends=(Send(root, result),)))
    return assemble(steps, scratch=result.stop)


def all_gather(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Send the own part to all."""
    bounds = offsets_of(counts)
    mine = source(0, counts[rank])
    copy = Copy(target(bounds[rank], bounds[rank + 1]), mine)
    return assemble([_share(rank, world_size, bounds, mine), copy])


def gather(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Send the own part to the root."""
    mine = source(0, counts[rank])
    if rank != root:
        return assemble([Exchange(sends=(Send(root, mine),))])
    bounds = offsets_of(counts)
    recvs = (Recv(peer, target(*bounds[peer : peer + 2])) for peer in peers_after(rank, world_size))
    return assemble([Exchange(recvs=tuple(recvs)), Copy(target(*bounds[rank : rank + 2]), mine)])


def scatter(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Send each part from the root to its rank."""
    mine = target(0, counts[rank])
    if rank != root:
        return assemble([Exchange(recvs=(Recv(root, mine),))])
    bounds = offsets_of(counts)
    sends = (Send(peer, source(*bounds[peer : peer + 2])) for peer in peers_after(rank, world_size))
    return assemble([Exchange(sends=tuple(sends)), Copy(mine, source(*bounds[rank : rank + 2]))])


def all_to_all(rank: int, world_size: int, sent: Sequence[int], received: Sequence[int]) -> Schedule:
    """Send each part to its rank, all at once."""
    outgoing, incoming = offsets_of(sent), offsets_of(received)
    sends = (Send(peer, source(*outgoing[peer : peer + 2])) for peer in peers_after(rank, world_size))
    recvs = (Recv(peer, target(*incoming[peer : peer + 2])) for peer in peers_before(rank, world_size))
    own = Copy(target(*incoming[rank : rank + 2]), source(*outgoing[rank : rank + 2]))
    return assemble([Exchange(tuple(sends), tuple(recvs)), own])


def all_reduce_whole(rank: int, world_size: int, numel: int) -> Schedule:
    """Send the whole vector to all, and fold everywhere: one round, for short vectors."""
    return _fold_whole(rank, world_size, numel, range(world_size))


def reduce_whole(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Send the whole vector to the root, which folds: one round, for short vectors."""
    return _fold_whole(rank, world_size, numel, (root,))


def peers_before(rank: int, world_size: int) -> Iterable[int]:
    """Yield the other ranks in the order in which they come to send to this one."""
    return ((rank - distance) % world_size for distance in range(1, world_size))


def _fold_own(rank: int, world_size: int, bounds: Sequence[int], result: Span) -> list[Step]:
    """Exchange unreduced parts and fold the own one in rank order."""
    own = source(bounds[rank], bounds[rank + 1])
    if world_size == 1:
        return [Copy(result, own)]
    sends = (Send(peer, source(*bounds[peer : peer + 2])) for peer in peers_after(rank, world_size))
    arrived = _arrivals(rank, world_size, own.numel)
    recvs = (Recv(peer, arrived[peer]) for peer in peers_before(rank, world_size))
    arrived[rank] = own
    return [Exchange(tuple(sends), tuple(recvs)), Fold(result, tuple(arrived))]


def _fold_whole(rank: int, world_size: int, numel: int, folding: Sequence[int]) -> Schedule:
    own, result = source(0, numel), target(0, numel)
    if world_size == 1:
        return assemble([Copy(result, own)])
    sends = tuple(Send(peer, own) for peer in peers_after(rank, world_size) if peer in folding)
    if rank not in folding:
        return assemble([Exchange(sends)])
    arrived = _arrivals(rank, world_size, numel)
    recvs = tuple(Recv(peer, arrived[peer]) for peer in peers_before(rank, world_size))
    arrived[rank] = own
    return assemble([Exchange(sends, recvs), Fold(result, tuple(arrived))], scratch=(world_size - 1) * numel)


def _arrivals(rank: int, world_size: int, numel: int) -> list[Span]:
    """Return a span of scratch for each rank's contribution; that of the own rank is of no use."""
    return [
        scratch(place * numel, (place + 1) * numel)
        for place in (peer if peer < rank else peer - 1 for peer in range(world_size))
    ]


def _share(rank: int, world_size: int, bounds: Sequence[int], mine: Span) -> Exchange:
    """Send the own part to all and receive theirs."""
    sends = (Send(peer, mine) for peer in peers_after(rank, world_size))
    recvs = (Recv(peer, target(*bounds[peer : peer + 2])) for peer in peers_before(rank, world_size))
    return Exchange(tuple(sends), tuple(recvs))
