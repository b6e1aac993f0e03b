"""Binomial trees: ``ceil(log2 W)`` rounds from the root to all ranks, or back.

Ranks are numbered from the root (*places*); the subtree of a place is a run of places; its length is the
lowest set bit of the place. For short messages, and if the root should not send to all ranks.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dist2.backends.socket.algorithms.schedule import (
    Copy,
    Exchange,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
)
from dist2.backends.socket.algorithms.spans import assemble, offsets_of, scratch, source, target


def subtree_size(place: int, world_size: int) -> int:
    """Return how many places the subtree of one has, itself included."""
    if place == 0:
        return world_size
    return min(place & -place, world_size - place)


def children_of(place: int, world_size: int) -> list[int]:
    """Return the places below one, the largest subtree first."""
    children = []
    distance = 1
    while place + distance < world_size and (place == 0 or distance < place & -place):
        children.append(place + distance)
        distance *= 2
    return children[::-1]


def parent_of(place: int) -> int:
    """Return the parent of a place that is not the root."""
    return place & (place - 1)


def broadcast(rank: int, world_size: int, numel: int, root: int) -> Schedule:
    """Send the whole vector down the tree."""
    place = (rank - root) % world_size
    whole = target(0, numel)
    steps: list[Step] = []
    if place:
        steps.append(Exchange(recvs=(Recv((parent_of(place) + root) % world_size, whole),)))
    else:
        steps.append(Copy(whole, source(0, numel)))
    children = children_of(place, world_size)
    steps.append(Exchange(tuple(Send((child + root) % world_size, whole) for child in children)))
    return assemble(steps)


def gather(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Collect the parts of subtrees up the tree."""
    place = (rank - root) % world_size
    bounds = _places_bounds(world_size, counts, root)
    size = subtree_size(place, world_size)
    children = children_of(place, world_size)[::-1]
    mine = source(0, counts[rank])
    steps: list[Step] = []
    if children:
        steps.append(Copy(_subtree(place, place, 1, bounds), mine))
        recvs = (
            Recv((child + root) % world_size, _subtree(place, child, subtree_size(child, world_size), bounds))
            for child in children
        )
        steps.append(Exchange(recvs=tuple(recvs)))
        mine = _subtree(place, place, size, bounds)
    if place:
        steps.append(Exchange(sends=(Send((parent_of(place) + root) % world_size, mine),)))
    elif children:
        steps += [Copy(result, turned) for turned, result in _turned(counts, root, target)]
    else:
        steps.append(Copy(target(0, counts[rank]), mine))
    return assemble(steps, scratch=mine.numel if children else 0)


def scatter(rank: int, world_size: int, counts: Sequence[int], root: int) -> Schedule:
    """Hand the parts of subtrees down the tree."""
    place = (rank - root) % world_size
    bounds = _places_bounds(world_size, counts, root)
    size = subtree_size(place, world_size)
    children = children_of(place, world_size)
    result, held = target(0, counts[rank]), _subtree(place, place, size, bounds)
    if world_size == 1:
        return assemble([Copy(result, source(0, counts[rank]))])
    steps: list[Step] = []
    if place == 0:
        steps += [Copy(turned, given) for turned, given in _turned(counts, root, source)]
    else:
        parent = (parent_of(place) + root) % world_size
        steps.append(Exchange(recvs=(Recv(parent, held if children else result),)))
    if children:
        sends = (
            Send((child + root) % world_size, _subtree(place, child, subtree_size(child, world_size), bounds))
            for child in children
        )
        steps.append(Exchange(tuple(sends)))
        steps.append(Copy(result, _subtree(place, place, 1, bounds)))
    return assemble(steps, scratch=held.numel if children else 0)


def _places_bounds(world_size: int, counts: Sequence[int], root: int) -> list[int]:
    """Return where each place's part starts when parts lie in the order of places."""
    return offsets_of([counts[(place + root) % world_size] for place in range(world_size)])


def _subtree(place: int, first: int, size: int, bounds: Sequence[int]) -> Span:
    """Return where the parts of ``size`` places lie in the scratch of a place."""
    start = bounds[place]
    return scratch(bounds[first] - start, bounds[first + size] - start)


def _turned(
    counts: Sequence[int], root: int, buffer: Callable[[int, int], Span]
) -> tuple[tuple[Span, Span], tuple[Span, Span]]:
    """Pair the parts in scratch, in the order of places, with those in a buffer, in rank order."""
    bounds = offsets_of(counts)
    total, first = bounds[-1], bounds[root]
    behind = total - first
    return (scratch(0, behind), buffer(first, total)), (scratch(behind, total), buffer(0, first))
