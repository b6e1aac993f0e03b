"""Moves over several hosts with several ranks each: received data is shared inside the host.

Everything crosses to a host once, spread over its ranks; they hand it to each other through shared
memory. Long operations go in passes (see `pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.binomial import children_of, parent_of
from dist2.backends.socket.algorithms.hosts import host_map
from dist2.backends.socket.algorithms.pipeline import passes_of, turns
from dist2.backends.socket.algorithms.schedule import (
    Copy,
    Exchange,
    Fence,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
)
from dist2.backends.socket.algorithms.spans import (
    assemble,
    exchange,
    offsets_of,
    scratch,
    slot,
    source,
    target,
)

FEW_HOSTS = 4
"""Among so many hosts, short data go to all others at once, in one network latency. A tree takes as many
messages and two latencies; so does a barrier in rounds, with a third fewer messages."""

_SEGMENTS = 2
"""A pass is copied in and out in one turn, around a fence: the turn after writes elsewhere."""


def barrier(rank: int, layout: tuple[int, ...]) -> Schedule:
    """Fence inside the host; one rank a host disseminates (with few hosts: signals all); fence again.

    In round k it signals the one at distance ``2**k``, and so has a signal from each, directly or not.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
    Program. 17 (1988).
    """
    hosts = host_map(layout)
    host, beside = hosts.of[rank], hosts.beside(rank)
    together: list[Step] = [Fence()] if len(beside) > 1 else []
    steps = list(together)
    if rank == beside[0] and hosts.count > 1:
        nothing, distance = scratch(0, 0), 1
        if hosts.count <= FEW_HOSTS:
            peers = [hosts.members[each][0] for each in hosts.others(host)]
            sends, recvs = [Send(peer, nothing) for peer in peers], [Recv(peer, nothing) for peer in peers]
            return Schedule((*steps, Exchange(tuple(sends), tuple(recvs)), *together))
        while distance < hosts.count:
            to, of = (host + distance) % hosts.count, (host - distance) % hosts.count
            steps.append(exchange(hosts.members[to][0], nothing, hosts.members[of][0], nothing))
            distance *= 2
    return Schedule((*steps, *together))


def broadcast(rank: int, layout: tuple[int, ...], numel: int, root: int, capacity: int) -> Schedule:
    """Share the vector on the root's host, send each rail down a tree of hosts, share it there."""
    return _Broadcast(rank, layout, numel, root, capacity, host_map(layout).rails).schedule()


def broadcast_tree(rank: int, layout: tuple[int, ...], numel: int, root: int, capacity: int) -> Schedule:
    """Send the whole vector to one rank of each host, down a tree if they are many: for short ones."""
    return _Broadcast(rank, layout, numel, root, capacity, 1).schedule()


class _Broadcast:
    """Builds the schedule of one rank.

    Args:
        rails: Into how many rails the vector is cut.
    """

    def __init__(
        self, rank: int, layout: tuple[int, ...], numel: int, root: int, capacity: int, rails: int
    ) -> None:
        self._rank = rank
        self._root = root
        self._hosts = host_map(layout)
        self._host = self._hosts.of[rank]
        self._beside = self._hosts.beside(rank)
        self._rails = rails
        self._passes, self._segment = passes_of(numel, capacity, _SEGMENTS)
        self._slot = numel if self._segment == 0 else _SEGMENTS * self._segment
        first = self._hosts.of[root]
        place = (self._host - first) % self._hosts.count
        count = self._hosts.count
        if rails == 1 and count <= FEW_HOSTS:
            parent, children = 0, list(range(1, count)) if place == 0 else []
        else:
            parent, children = parent_of(place) if place else 0, children_of(place, count)
        self._parent = (parent + first) % count if place else None
        self._children = [(child + first) % count for child in children]

    def schedule(self) -> Schedule:
        """Return it."""
        steps: list[Step] = []
        count = self._passes.count
        if self._parent is None:
            for index in range(count):
                steps += self._give(index)
        else:
            for entering, leaving in turns(count, (0, 1 if count > 1 else 0)):
                if entering is not None:
                    steps += self._receive(entering)
                if leaving is not None and len(self._beside) > 1:
                    steps += self._share(leaving)
        return assemble(steps, slot=self._slot)

    def _bounds(self, index: int) -> list[int]:
        return self._passes.cut(index, self._rails)

    def _slot_of(self, owner: int, index: int, start: int, stop: int) -> Span:
        offset = index % _SEGMENTS * self._segment - self._passes.stretch(index)[0]
        return slot(owner, offset + start, offset + stop)

    def _carrier(self, host: int, rail: int) -> int:
        if self._rails == 1 and host == self._hosts.of[self._root]:
            return self._root
        return self._hosts.carrier(host, rail)

    def _carried(self, index: int) -> list[tuple[int, int, int]]:
        """Return the rails that this rank carries: number, first element, one past the last."""
        bounds = self._bounds(index)
        return [
            (number, bounds[number], bounds[number + 1])
            for number in range(self._rails)
            if self._carrier(self._host, number) == self._rank
        ]

    def _forward(self, index: int) -> Exchange:
        """Send the own rails to the hosts below."""
        found = source if self._rank == self._root else target
        return Exchange(
            tuple(
                Send(self._carrier(child, number), found(start, stop))
                for child in self._children
                for number, start, stop in self._carried(index)
            )
        )

    def _give(self, index: int) -> list[Step]:
        """On the root's host: share a pass, and send it on."""
        start, stop = self._passes.stretch(index)
        shared = self._slot_of(self._root, index, start, stop)
        is_root, together = self._rank == self._root, len(self._beside) > 1
        steps: list[Step] = []
        if is_root:
            steps.append(self._forward(index))
            steps += [Copy(shared, source(start, stop))] if together else []
        steps += [Fence()] if together else []
        steps.append(Copy(target(start, stop), source(start, stop) if is_root else shared))
        if not is_root:
            steps.append(self._forward(index))
        return steps

    def _receive(self, index: int) -> list[Step]:
        """On another host: take the own rails of a pass and send them on."""
        assert self._parent is not None  # the root's host receives nothing
        recvs = [
            Recv(self._carrier(self._parent, number), target(start, stop))
            for number, start, stop in self._carried(index)
        ]
        return [Exchange(recvs=tuple(recvs)), self._forward(index)]

    def _share(self, index: int) -> list[Step]:
        """On another host: give the own rails to its other ranks, and take theirs."""
        steps: list[Step] = [
            Copy(self._slot_of(self._rank, index, start, stop), target(start, stop))
            for _, start, stop in self._carried(index)
        ]
        steps.append(Fence())
        bounds = self._bounds(index)
        for number in range(self._rails):
            owner, start, stop = self._carrier(self._host, number), bounds[number], bounds[number + 1]
            if owner != self._rank:
                steps.append(Copy(target(start, stop), self._slot_of(owner, index, start, stop)))
        return steps


def all_gather(rank: int, layout: tuple[int, ...], counts: Sequence[int], capacity: int) -> Schedule:
    """Send the own part to one rank of each other host, then share the received parts inside the host."""
    return _Gathering(rank, layout, counts, capacity).schedule()


class _Gathering:
    """Builds the schedule of one rank.

    Args:
        counts: Elements of each rank's part.
    """

    def __init__(self, rank: int, layout: tuple[int, ...], counts: Sequence[int], capacity: int) -> None:
        self._rank = rank
        self._hosts = host_map(layout)
        self._host = self._hosts.of[rank]
        self._beside = self._hosts.beside(rank)
        self._counts = counts
        self._offsets = offsets_of(counts)
        # Which parts each rank of this host holds, and the most that any rank anywhere holds.
        self._held = {each: self._held_by(each) for each in self._beside}
        most = max(len(self._held_by(each)) for each in range(len(layout)))
        self._passes, segment = passes_of(max(counts), capacity // most, _SEGMENTS)
        self._segment = most * segment
        self._slot = most * (max(counts) if segment == 0 else _SEGMENTS * segment)

    def _held_by(self, rank: int) -> list[int]:
        host = self._hosts.of[rank]
        return [part for part in range(len(self._counts)) if self._hosts.counterpart(part, host) == rank]

    def schedule(self) -> Schedule:
        """Return it."""
        steps: list[Step] = []
        count = self._passes.count
        for entering, leaving in turns(count, (0, 1 if count > 1 else 0)):
            if entering is not None:
                steps.append(self._cross(entering))
            if leaving is not None:
                steps += self._share(leaving)
        return assemble(steps, slot=self._slot)

    def _target(self, index: int, part: int) -> Span:
        start, stop = self._passes.clip(index, self._counts[part])
        return target(self._offsets[part] + start, self._offsets[part] + stop)

    def _source(self, index: int) -> Span:
        return source(*self._passes.clip(index, self._counts[self._rank]))

    def _slot_of(self, owner: int, index: int, part: int) -> Span:
        start, stop = self._passes.clip(index, self._counts[part])
        base = index % _SEGMENTS * self._segment + self._held[owner].index(part) * self._passes.size
        return slot(owner, base, base + stop - start)

    def _cross(self, index: int) -> Exchange:
        """Send the own part to the representatives of this rank; receive the parts of ranks that this one
        represents."""
        sends = [
            Send(self._hosts.counterpart(self._rank, host), self._source(index))
            for host in self._hosts.others(self._host)
        ]
        held = self._held[self._rank]
        recvs = [Recv(part, self._target(index, part)) for part in held if part not in self._beside]
        return Exchange(tuple(sends), tuple(recvs))

    def _share(self, index: int) -> list[Step]:
        mine = self._source(index)
        steps: list[Step] = [Copy(self._target(index, self._rank), mine)]
        if len(self._beside) == 1:
            return steps
        for part in self._held[self._rank]:
            span = mine if part == self._rank else self._target(index, part)
            steps.append(Copy(self._slot_of(self._rank, index, part), span))
        steps.append(Fence())
        for owner in self._beside:
            if owner != self._rank:
                steps += [
                    Copy(self._target(index, part), self._slot_of(owner, index, part))
                    for part in self._held[owner]
                ]
        return steps
