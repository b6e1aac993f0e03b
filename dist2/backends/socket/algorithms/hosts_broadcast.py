"""A broadcast over several hosts whose ranks write into each other's tensors: no slots, two fences.

As in `hosts_moving.py`, the vector is cut into rails, and each goes down a tree of hosts from carrier to
carrier. On the root's host the carriers read their rails out of the root's tensor; everywhere a carrier
writes its rail into the tensors of the other ranks of its host, piece by piece, while what it has just
sent or received is still in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from dist2.backends.socket.algorithms.binomial import children_of, parent_of
from dist2.backends.socket.algorithms.hosts import host_map
from dist2.backends.socket.algorithms.schedule import (
    Buffer,
    Copy,
    Exchange,
    Fence,
    Recv,
    Schedule,
    Send,
    Step,
    chunk_bounds,
)
from dist2.backends.socket.algorithms.spans import assemble, lent, source, target


def broadcast(rank: int, layout: tuple[int, ...], numel: int, root: int, piece: int) -> Schedule:
    """Send rails down a tree of hosts, and hand them out inside each.

    Args:
        rank: Whose schedule.
        layout: Number of each rank's host.
        numel: Elements of the vector.
        root: Who has it.
        piece: Elements of a rail that are sent at a time.
    """
    return _Broadcast(rank, layout, numel, root, max(1, piece)).schedule()


class _Broadcast:
    """Builds the schedule of one rank; see `broadcast`."""

    def __init__(self, rank: int, layout: tuple[int, ...], numel: int, root: int, piece: int) -> None:
        self._rank = rank
        self._root = root
        self._numel = numel
        self._piece = piece
        self._hosts = host_map(layout)
        self._beside = self._hosts.beside(rank)
        count, first = self._hosts.count, self._hosts.of[root]
        place = (self._hosts.of[rank] - first) % count
        self._parent = (parent_of(place) + first) % count if place else None
        self._children = [(child + first) % count for child in children_of(place, count)]

    def schedule(self) -> Schedule:
        """Return it."""
        together: list[Step] = [Fence()] if len(self._beside) > 1 else []
        steps = list(together)
        for rail, start, stop in self._pieces():
            steps += self._enter(rail, start, stop)
            steps += self._forward(rail, start, stop)
            steps += self._hand_out(start, stop)
        if self._rank == self._root:
            steps.append(Copy(target(0, self._numel), source(0, self._numel)))
        lends = Buffer.INPUT if self._rank == self._root else Buffer.OUTPUT
        return assemble([*steps, *together], lends=lends if together else None)

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of the own rails: which rail it is, first element, one past the last."""
        bounds = chunk_bounds(self._numel, self._hosts.rails)
        for rail in self._hosts.rails_of(self._rank):
            for start in range(bounds[rail], bounds[rail + 1], self._piece):
                yield rail, start, min(start + self._piece, bounds[rail + 1])

    def _enter(self, rail: int, start: int, stop: int) -> list[Step]:
        """Get a piece: from the root, or from the host above."""
        if self._rank == self._root:
            return []
        if self._parent is None:
            return [Copy(target(start, stop), lent(self._root, 0, start, stop))]
        return [Exchange(recvs=(Recv(self._hosts.carrier(self._parent, rail), target(start, stop)),))]

    def _forward(self, rail: int, start: int, stop: int) -> list[Step]:
        """Send a piece to the hosts below."""
        found = source if self._rank == self._root else target
        sends = [Send(self._hosts.carrier(child, rail), found(start, stop)) for child in self._children]
        return [Exchange(tuple(sends))] if sends else []

    def _hand_out(self, start: int, stop: int) -> list[Step]:
        """Write a piece into the tensors of those of this host that do not have it."""
        found = source if self._rank == self._root else target
        others = [each for each in self._beside if each not in (self._rank, self._root)]
        return [Copy(lent(each, 0, start, stop), found(start, stop)) for each in others]
