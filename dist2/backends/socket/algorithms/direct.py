"""Direct algorithms: every rank exchanges with every other at once.

They send as many bytes as a ring does, in one or two rounds of ``W-1`` messages. Contributions travel
*unreduced* to the rank that owns the chunk, which folds them in rank order: so the result depends neither on
the chunk nor on the algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from dist2.backends.socket.algorithms.hosts import folding_groups
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
    exchange,
    fold_in_order,
    offsets_of,
    peers_after,
    peers_before,
    scratch,
    source,
    target,
)

UNLIMITED = 1 << 62
"""Elements in one pass where scratch is no concern."""


def all_reduce(
    rank: int, world_size: int, numel: int, limit: int = UNLIMITED, layout: tuple[int, ...] = ()
) -> Schedule:
    """Send each chunk to its owner, which folds it and sends the result to all.

    Long vectors go in passes of up to ``limit`` elements, which bounds the scratch; the results of one
    pass travel together with the contributions to the next.
    """
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    steps: list[Step] = []
    results = Exchange()
    for bounds in _passes(numel, world_size, limit):
        mine = target(bounds[rank], bounds[rank + 1])
        contributions, folds = _fold_own(rank, world_size, bounds, mine, layout)
        steps += [_together(results, contributions), *folds]
        results = _share(rank, world_size, bounds, mine)
    longest = -(-min(numel, limit) // world_size)
    return assemble([*steps, results], scratch=(world_size - 1) * longest)


def reduce_scatter(
    rank: int, world_size: int, counts: Sequence[int], limit: int = UNLIMITED, layout: tuple[int, ...] = ()
) -> Schedule:
    """Send each part to its owner, which folds it; long parts in passes of at most ``limit`` elements."""
    offsets = offsets_of(counts)
    if world_size == 1:
        return assemble([Copy(target(0, counts[0]), source(0, counts[0]))])
    size = max(1, limit // world_size)
    steps: list[Step] = []
    for start in range(0, max(counts), size):
        stretches = [
            (offset + min(start, count), offset + min(start + size, count))
            for offset, count in zip(offsets, counts, strict=False)
        ]
        low, high = min(start, counts[rank]), min(start + size, counts[rank])
        exchange, folds = _fold_stretches(rank, world_size, stretches, target(low, high), layout)
        steps += [exchange, *folds]
    return assemble(steps, scratch=(world_size - 1) * min(size, counts[rank]))


def reduce(
    rank: int, world_size: int, numel: int, root: int, limit: int = UNLIMITED, layout: tuple[int, ...] = ()
) -> Schedule:
    """Send each chunk to its owner, which folds it and sends the result to the root; in passes if long."""
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    longest = -(-min(numel, limit) // world_size)
    others = (world_size - 1) * longest
    steps: list[Step] = []
    results = Exchange()
    for bounds in _passes(numel, world_size, limit):
        low, high = bounds[rank], bounds[rank + 1]
        mine = target(low, high) if rank == root else scratch(others, others + high - low)
        contributions, folds = _fold_own(rank, world_size, bounds, mine, layout)
        steps += [_together(results, contributions), *folds]
        if rank == root:
            peers = peers_before(rank, world_size)
            results = Exchange(recvs=tuple(Recv(peer, target(*bounds[peer : peer + 2])) for peer in peers))
        else:
            results = Exchange(sends=(Send(root, mine),))
    return assemble([*steps, results], scratch=others + (0 if rank == root else longest))


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
    return assemble([Exchange(tuple(sends), tuple(recvs)), own], sizes_known=False)


def all_to_all_in_pairs(rank: int, world_size: int, sent: Sequence[int], received: Sequence[int]) -> Schedule:
    """Send the same messages one after another, where all at once would crowd the receivers."""
    outgoing, incoming = offsets_of(sent), offsets_of(received)
    steps: list[Step] = [Copy(target(*incoming[rank : rank + 2]), source(*outgoing[rank : rank + 2]))]
    for distance in range(1, world_size):
        to, of = (rank + distance) % world_size, (rank - distance) % world_size
        steps.append(exchange(to, source(*outgoing[to : to + 2]), of, target(*incoming[of : of + 2])))
    return assemble(steps, sizes_known=False)


def all_reduce_whole(rank: int, world_size: int, numel: int, layout: tuple[int, ...] = ()) -> Schedule:
    """Send the whole vector to all, and fold everywhere: one round, for short vectors."""
    return _fold_whole(rank, world_size, numel, range(world_size), layout)


def reduce_whole(rank: int, world_size: int, numel: int, root: int, layout: tuple[int, ...] = ()) -> Schedule:
    """Send the whole vector to the root, which folds: one round, for short vectors."""
    return _fold_whole(rank, world_size, numel, (root,), layout)


def _passes(numel: int, world_size: int, limit: int) -> Iterator[list[int]]:
    """Cut a vector into passes and each into a chunk a rank; yield the bounds of the chunks."""
    for start in range(0, numel, limit):
        chunks = chunk_bounds(min(limit, numel - start), world_size)
        yield [start + bound for bound in chunks]


def _fold_own(
    rank: int, world_size: int, bounds: Sequence[int], result: Span, layout: tuple[int, ...]
) -> tuple[Exchange, list[Fold]]:
    """Exchange unreduced chunks and fold the own one in order."""
    return _fold_stretches(rank, world_size, list(pairwise(bounds)), result, layout)


def _fold_stretches(
    rank: int,
    world_size: int,
    stretches: Sequence[tuple[int, int]],
    result: Span,
    layout: tuple[int, ...],
) -> tuple[Exchange, list[Fold]]:
    """Exchange the stretches of the inputs with their owners, and fold the own stretch."""
    own = source(*stretches[rank])
    sends = (Send(peer, source(*stretches[peer])) for peer in peers_after(rank, world_size))
    arrived = _arrivals(rank, world_size, own.numel)
    recvs = (Recv(peer, arrived[peer]) for peer in peers_before(rank, world_size))
    exchange = Exchange(tuple(sends), tuple(recvs))
    arrived[rank] = own
    return exchange, fold_in_order(result, arrived, folding_groups(layout, world_size))


def _together(first: Exchange, second: Exchange) -> Exchange:
    return Exchange(first.sends + second.sends, first.recvs + second.recvs)


def _fold_whole(
    rank: int, world_size: int, numel: int, folding: Sequence[int], layout: tuple[int, ...]
) -> Schedule:
    own, result = source(0, numel), target(0, numel)
    if world_size == 1:
        return assemble([Copy(result, own)])
    sends = tuple(Send(peer, own) for peer in peers_after(rank, world_size) if peer in folding)
    if rank not in folding:
        return assemble([Exchange(sends)])
    arrived = _arrivals(rank, world_size, numel)
    recvs = tuple(Recv(peer, arrived[peer]) for peer in peers_before(rank, world_size))
    arrived[rank] = own
    folds = fold_in_order(result, arrived, folding_groups(layout, world_size))
    return assemble([Exchange(sends, recvs), *folds], scratch=(world_size - 1) * numel)


def _arrivals(rank: int, world_size: int, numel: int) -> list[Span]:
    """Return a span of scratch for each rank's contribution; this rank's own span is not used."""
    return [
        scratch(place * numel, (place + 1) * numel)
        for place in (peer if peer < rank else peer - 1 for peer in range(world_size))
    ]


def _share(rank: int, world_size: int, bounds: Sequence[int], mine: Span) -> Exchange:
    """Send the own part to all and receive theirs."""
    sends = (Send(peer, mine) for peer in peers_after(rank, world_size))
    recvs = (Recv(peer, target(*bounds[peer : peer + 2])) for peer in peers_before(rank, world_size))
    return Exchange(tuple(sends), tuple(recvs))
