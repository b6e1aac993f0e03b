"""Van de Geijn's broadcast: scatter chunks down a binomial tree, then pass them around a ring.

Every rank sends and receives about twice the vector instead of the root sending it ``log2 W`` times: for long
vectors. Chunks that a rank has from the tree are not sent to it again.

Source: M. Barnett, L. Shuler, R. van de Geijn, et al., "Interprocessor collective communication library
(InterCom)", Scalable High Performance Computing Conference (1994).
"""

from __future__ import annotations

from dist2.backends.socket.algorithms.binomial import children_of, parent_of, subtree_size
from dist2.backends.socket.algorithms.schedule import (
    Copy,
    Exchange,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
    chunk_bounds,
)
from dist2.backends.socket.algorithms.spans import assemble, source, target


def broadcast(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Scatter, then gather, in place."""
    bounds = chunk_bounds(numel, world_size)
    place = (rank - root) % world_size

    def subtree(first: int) -> Span:
        return target(bounds[first], bounds[first + subtree_size(first, world_size)])

    def rank_of(other: int) -> int:
        return (other + root) % world_size

    steps: list[Step] = []
    if place:
        steps.append(Exchange(recvs=(Recv(rank_of(parent_of(place)), subtree(place)),)))
    else:
        steps.append(Copy(target(0, numel), source(0, numel)))
    children = children_of(place, world_size)
    steps.append(Exchange(tuple(Send(rank_of(child), subtree(child)) for child in children)))
    following, previous = (place + 1) % world_size, (place - 1) % world_size
    for distance in range(world_size - 1):
        sent, received = (place - distance) % world_size, (previous - distance) % world_size
        sends = [] if _has(following, sent, world_size) else [sent]
        recvs = [] if _has(place, received, world_size) else [received]
        steps.append(
            Exchange(
                tuple(Send(rank_of(following), target(*bounds[chunk : chunk + 2])) for chunk in sends),
                tuple(Recv(rank_of(previous), target(*bounds[chunk : chunk + 2])) for chunk in recvs),
            )
        )
    return assemble(steps)


def _has(place: int, chunk: int, world_size: int) -> bool:
    """Return whether a place got a chunk from the tree."""
    return place <= chunk < place + subtree_size(place, world_size)
