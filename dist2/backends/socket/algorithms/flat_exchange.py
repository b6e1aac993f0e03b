"""`all_to_all` through shared memory where each rank knows only its own sizes.

The part for each rank is in the slot at a fixed stride, so that no rank needs the sizes that others exchange.
The stride is the same on all ranks: the share of one part of half a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.schedule import Copy, Fence, Schedule, Step
from dist2.backends.socket.algorithms.spans import assemble, offsets_of, peers_after, slot, source, target


def flat_exchange(rank: int, sent: Sequence[int], received: Sequence[int], stride: int) -> Schedule:
    """Copy each part to its place in the own slot, fence, copy the own parts out of the others' slots.

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
