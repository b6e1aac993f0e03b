"""Recursive doubling and halving: a power of two of ranks exchange in pairs at distances 1, 2, 4, ...

Doubling sends the whole vector ``log2 W`` times: fewest messages, for short vectors. Rabenseifner's
algorithm reduces by halving and gathers by doubling: as few bytes as a ring in ``2 log2 W`` messages.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from dist2.backends.socket.algorithms.schedule import Copy, Fold, Schedule, Step, chunk_bounds
from dist2.backends.socket.algorithms.spans import assemble, exchange, scratch, source, target


def all_reduce_doubling(rank: int, world_size: int, numel: int) -> Schedule:
    """Exchange and fold whole vectors at doubling distances."""
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    steps: list[Step] = []
    received, mine = scratch(0, numel), source(0, numel)
    distance = 1
    while distance < world_size:
        partner = rank ^ distance
        steps.append(exchange(partner, mine, partner, received))
        # The lower rank's stands on the left, so that both compute the same.
        pair = (mine, received) if rank < partner else (received, mine)
        distance *= 2
        steps.append(Fold(target(0, numel), pair, final=distance == world_size))
        mine = target(0, numel)
    return assemble(steps, scratch=numel)


def all_reduce_halving(rank: int, world_size: int, numel: int) -> Schedule:
    """Reduce-scatter by recursive halving, then gather by recursive doubling (Rabenseifner)."""
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    bounds = chunk_bounds(numel, world_size)
    reducing: list[Step] = []
    gathering: list[Step] = []
    own, low, high = source, 0, world_size
    distance = world_size // 2
    while distance:
        partner = rank ^ distance
        middle = low + distance
        halves = [(low, middle), (middle, high)]
        low, high = halves.pop(rank & distance != 0)
        kept, sent = ((bounds[start], bounds[end]) for start, end in ((low, high), *halves))
        received = scratch(0, kept[1] - kept[0])
        reducing.append(exchange(partner, own(*sent), partner, received))
        reducing.append(Fold(target(*kept), (received, own(*kept)), final=distance == 1))
        gathering.append(exchange(partner, target(*kept), partner, target(*sent)))
        own = target
        distance //= 2
    return assemble(reducing + gathering[::-1], scratch=numel)
