"""Ring algorithms: every rank sends to the next and receives from the previous one, world size - 1 times.

Each rank sends ``2 (W-1)/W`` of the data for `all_reduce`, ``(W-1)/W`` for `all_gather`: the least possible,
with neighbours only. Sums are folded in the order of the ring, which depends on the chunk.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.schedule import Copy, Fold, Schedule, Step, chunk_bounds
from dist2.backends.socket.algorithms.spans import assemble, exchange, offsets_of, scratch, source, target


def all_reduce(rank: int, world_size: int, numel: int) -> Schedule:
    """Reduce-scatter chunks around the ring, then gather them the same way."""
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    bounds = chunk_bounds(numel, world_size)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    steps: list[Step] = []
    for step in range(world_size - 1):
        sent, kept = (rank - step) % world_size, (rank - step - 1) % world_size
        low, high = bounds[kept], bounds[kept + 1]
        received = scratch(0, high - low)
        partial = (source if step == 0 else target)(bounds[sent], bounds[sent + 1])
        steps.append(exchange(following, partial, previous, received))
        final = step == world_size - 2
        steps.append(Fold(target(low, high), (received, source(low, high)), final))
    steps += _gather_around(rank, world_size, bounds, owned=following)
    return assemble(steps, scratch=bounds[1])


def all_gather(rank: int, world_size: int, counts: Sequence[int]) -> Schedule:
    """Pass every part around the ring."""
    bounds = offsets_of(counts)
    own: list[Step] = [Copy(target(bounds[rank], bounds[rank + 1]), source(0, counts[rank]))]
    return assemble(own + _gather_around(rank, world_size, bounds, owned=rank))


def _gather_around(rank: int, world_size: int, bounds: Sequence[int], owned: int) -> list[Step]:
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    steps: list[Step] = []
    for step in range(world_size - 1):
        sent, received = (owned - step) % world_size, (owned - step - 1) % world_size
        steps.append(
            exchange(
                following,
                target(bounds[sent], bounds[sent + 1]),
                previous,
                target(bounds[received], bounds[received + 1]),
            )
        )
    return steps
