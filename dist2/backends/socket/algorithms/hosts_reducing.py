"""Reductions over several hosts with several ranks each: inside the host first, then between hosts.

A vector is cut into rails, and on each host a rank carries each. The ranks of a host copy the parts that
others carry to their slots; each folds its own rail out of the slots, in rank order, and exchanges the result
with the carriers of the same rail on the other hosts. Then it folds the results of all hosts in the order of
hosts. So a host sends as many bytes as one rank would, spread over all its ranks.

Long vectors go in passes (see `pipeline.py`): the messages of one pass are in flight while the next is copied
and folded in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from dist2.backends.socket.algorithms.hosts import HostMap, host_map
from dist2.backends.socket.algorithms.pipeline import passes_of, turns
from dist2.backends.socket.algorithms.schedule import (
    Copy,
    Exchange,
    Fence,
    Fold,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
    chunk_bounds,
)
from dist2.backends.socket.algorithms.spans import assemble, offsets_of, scratch, slot, source, target

_SEGMENTS = 4
"""A pass is copied in, folded a turn later, copied out another turn later: one more keeps a fence between."""


def all_reduce_whole(rank: int, layout: tuple[int, ...], numel: int, capacity: int, piece: int) -> Schedule:
    """Send the own rail to its carriers on all hosts, which all fold it: one message between two hosts."""
    return _Reducing(rank, layout, numel, capacity, piece, range(len(layout)), chunked=False).schedule()


def all_reduce_direct(rank: int, layout: tuple[int, ...], numel: int, capacity: int, piece: int) -> Schedule:
    """Send chunks of the own rail to the host that owns them, which folds and sends to all: two rounds."""
    return _Reducing(rank, layout, numel, capacity, piece, range(len(layout)), chunked=True).schedule()


def reduce(rank: int, layout: tuple[int, ...], numel: int, capacity: int, piece: int, root: int) -> Schedule:
    """Send the own rail to its carrier on the root's host, which folds it; the root copies the results."""
    return _Reducing(rank, layout, numel, capacity, piece, (root,), chunked=False).schedule()


class _Piece(NamedTuple):
    """A piece of a rail, and a rank's steps for it in one pass.

    Attributes:
        rail: Number of the rail.
        start: First element.
        stop: One past the last.
        own: The partial result of this host.
        arrived: Where the other hosts' go.
    """

    rail: int
    start: int
    stop: int
    own: Span
    arrived: dict[int, Span]


class _Reducing:
    """Builds the schedule of one rank.

    Args:
        piece: Elements of a rail that are folded and sent at a time: while they are in the caches.
        collecting: Ranks that get the result.
        chunked: Each host folds a chunk of each rail, not all of it.
    """

    def __init__(
        self,
        rank: int,
        layout: tuple[int, ...],
        numel: int,
        capacity: int,
        piece: int,
        collecting: Sequence[int],
        *,
        chunked: bool,
    ) -> None:
        self._rank = rank
        self._hosts: HostMap = host_map(layout)
        self._host = self._hosts.of[rank]
        self._beside = self._hosts.beside(rank)
        self._alone = len(self._beside) == 1
        self._rails = self._hosts.rails_of(rank)
        self._collects = rank in collecting
        self._folding = {self._hosts.of[each] for each in collecting}
        self._chunked = chunked
        self._piece = max(1, piece)
        self._passes, self._segment = passes_of(numel, capacity, _SEGMENTS)
        self._slot = numel if self._segment == 0 else _SEGMENTS * self._segment
        longest = -(-min(numel, self._passes.size) // self._hosts.rails)
        # By rail: the own partial, and one from each other host.
        self._stride = longest
        self._set = len(self._rails) * self._hosts.count * longest

    def schedule(self) -> Schedule:
        """Return it."""
        count = self._passes.count
        lag = 1 if count > 1 else 0
        steps: list[Step] = []
        for entering, folded, leaving in turns(count, (0, lag, lag + 1)):
            if entering is not None:
                steps += self._copy_in(entering)
            if not self._alone:
                steps.append(Fence())
            if entering is not None:
                for piece in self._pieces(entering):
                    steps += self._fold_host(entering, piece)
                    steps.append(self._contribute(piece))
            if leaving is not None:
                steps += self._copy_out(leaving)
            if folded is not None:
                for piece in self._pieces(folded):
                    steps += self._fold_hosts(folded, piece)
        return assemble(steps, scratch=min(count, 2) * self._set, slot=self._slot)

    # Places

    def _bounds(self, index: int) -> list[int]:
        """Return where the rails of a pass begin, and where the last one ends."""
        return self._passes.cut(index, self._hosts.rails)

    def _slot_of(self, owner: int, index: int, start: int, stop: int) -> Span:
        """Return where elements of a pass lie in a slot."""
        offset = index % _SEGMENTS * self._segment - self._passes.stretch(index)[0]
        return slot(owner, offset + start, offset + stop)

    def _pieces(self, index: int) -> list[_Piece]:
        """Return the pieces of the own rails in a pass."""
        bounds = self._bounds(index)
        return [
            self._piece_at(index, place, start, min(start + self._piece, bounds[number + 1]), bounds[number])
            for place, number in enumerate(self._rails)
            for start in range(bounds[number], bounds[number + 1], self._piece)
        ]

    def _piece_at(self, index: int, place: int, start: int, stop: int, first: int) -> _Piece:
        """Return a piece of the rail that begins at ``first``, the ``place``-th of this rank."""
        base = index % 2 * self._set + place * self._hosts.count * self._stride + start - first
        own = source(start, stop) if self._alone else scratch(base, base + stop - start)
        low, high = self._chunk(self._host, start, stop)
        arrived = {}
        for turn, host in enumerate(self._hosts.others(self._host), start=1):
            at = base + turn * self._stride
            arrived[host] = scratch(at, at + high - low)
        return _Piece(self._rails[place], start, stop, own, arrived)

    def _chunk(self, host: int, start: int, stop: int) -> tuple[int, int]:
        """Return which elements of a piece a host folds."""
        if not self._chunked:
            return (start, stop) if host in self._folding else (start, start)
        bounds = chunk_bounds(stop - start, self._hosts.count)
        return start + bounds[host], start + bounds[host + 1]

    def _carriers(self, number: int) -> list[tuple[int, int]]:
        """Return the other hosts with their carriers of a rail."""
        return [(host, self._hosts.carrier(host, number)) for host in self._hosts.others(self._host)]

    # Stages

    def _copy_in(self, index: int) -> list[Step]:
        """Copy to the own slot the rails that others of this host carry."""
        if self._alone:
            return []
        bounds = self._bounds(index)
        return [
            Copy(self._slot_of(self._rank, index, start, stop), source(start, stop))
            for number, (start, stop) in enumerate(pairwise(bounds))
            if number not in self._rails
        ]

    def _fold_host(self, index: int, piece: _Piece) -> list[Step]:
        """Fold the parts of a piece on this host's ranks."""
        if self._alone:
            return []
        spans = [
            source(piece.start, piece.stop)
            if rank == self._rank
            else self._slot_of(rank, index, piece.start, piece.stop)
            for rank in self._beside
        ]
        return [Fold(piece.own, tuple(spans), final=False)]

    def _contribute(self, piece: _Piece) -> Exchange:
        """Exchange partial results with the other hosts that fold."""
        sends, recvs = [], []
        for host, peer in self._carriers(piece.rail):
            sends.append(Send(peer, _within(piece, *self._chunk(host, piece.start, piece.stop))))
            recvs.append(Recv(peer, piece.arrived[host]))
        return Exchange(tuple(sends), tuple(recvs))

    def _fold_hosts(self, index: int, piece: _Piece) -> list[Step]:
        """Fold the hosts' parts, in their order, to where the others of this host find it."""
        steps: list[Step] = []
        low, high = self._chunk(self._host, piece.start, piece.stop)
        if self._host in self._folding:
            spans = {**piece.arrived, self._host: _within(piece, low, high)}
            ordered = tuple(spans[host] for host in range(self._hosts.count))
            steps.append(Fold(self._result(index, low, high), ordered))
        if self._chunked:
            mine = self._result(index, low, high)
            sends, recvs = [], []
            for host, peer in self._carriers(piece.rail):
                sends.append(Send(peer, mine))
                theirs = self._chunk(host, piece.start, piece.stop)
                recvs.append(Recv(peer, self._result(index, *theirs)))
            steps.append(Exchange(tuple(sends), tuple(recvs)))
        return steps

    def _result(self, index: int, start: int, stop: int) -> Span:
        return target(start, stop) if self._alone else self._slot_of(self._rank, index, start, stop)

    def _copy_out(self, index: int) -> list[Step]:
        """Copy all rails out of the slots of their carriers."""
        if self._alone or not self._collects:
            return []
        bounds = self._bounds(index)
        return [
            Copy(
                target(start, stop),
                self._slot_of(self._hosts.carrier(self._host, number), index, start, stop),
            )
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]


def _within(piece: _Piece, start: int, stop: int) -> Span:
    """Return a stretch of this host's partial result of a piece."""
    offset = piece.own.start - piece.start
    return Span(piece.own.buffer, offset + start, offset + stop)


def reduce_scatter(rank: int, layout: tuple[int, ...], counts: Sequence[int], capacity: int) -> Schedule:
    """Fold each part on every host at the representative of its owner, which sends it to the owner."""
    return _Scattering(rank, layout, counts, capacity).schedule()


class _Scattering:
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
        world_size = len(layout)
        self._passes, segment = passes_of(max(counts), capacity // world_size, 2)
        self._segment = world_size * segment
        self._stride = self._passes.size
        self._slot = world_size * (max(counts) if segment == 0 else 2 * segment)
        self._mine = [part for part in range(world_size) if self._hosts.counterpart(part, self._host) == rank]
        # The partials of the parts it represents, and those of the other hosts of its own part.
        self._set = (len(self._mine) + self._hosts.count - 1) * min(max(counts), self._passes.size)

    def schedule(self) -> Schedule:
        """Return it."""
        count = self._passes.count
        steps: list[Step] = []
        for entering, folded in turns(count, (0, 1 if count > 1 else 0)):
            if entering is not None:
                if len(self._beside) > 1:
                    steps += [*self._copy_in(entering), Fence(), *self._fold_host(entering)]
                steps.append(self._contribute(entering))
            if folded is not None:
                steps.append(self._fold_hosts(folded))
        return assemble(steps, scratch=min(count, 2) * self._set, slot=self._slot)

    def _stretch(self, index: int, part: int) -> tuple[int, int]:
        return self._passes.clip(index, self._counts[part])

    def _source(self, index: int, part: int) -> Span:
        start, stop = self._stretch(index, part)
        return source(self._offsets[part] + start, self._offsets[part] + stop)

    def _slot_of(self, owner: int, index: int, part: int) -> Span:
        start, stop = self._stretch(index, part)
        base = index % 2 * self._segment + part * self._stride
        return slot(owner, base, base + stop - start)

    def _scratch(self, index: int, place: int, part: int) -> Span:
        start, stop = self._stretch(index, part)
        base = index % 2 * self._set + place * self._stride
        return scratch(base, base + stop - start)

    def _partial(self, index: int, part: int) -> Span:
        """Return the position of this host's partial result of a part."""
        if len(self._beside) == 1:
            return self._source(index, part)
        return self._scratch(index, self._mine.index(part), part)

    def _arrived(self, index: int, host: int) -> Span:
        return self._scratch(index, len(self._mine) + self._hosts.others(self._host).index(host), self._rank)

    def _copy_in(self, index: int) -> list[Step]:
        return [
            Copy(self._slot_of(self._rank, index, part), self._source(index, part))
            for part in range(len(self._counts))
            if part not in self._mine
        ]

    def _fold_host(self, index: int) -> list[Step]:
        steps: list[Step] = []
        for part in self._mine:
            pieces = [
                self._source(index, part) if rank == self._rank else self._slot_of(rank, index, part)
                for rank in self._beside
            ]
            steps.append(Fold(self._partial(index, part), tuple(pieces), final=False))
        return steps

    def _contribute(self, index: int) -> Exchange:
        sends = [Send(part, self._partial(index, part)) for part in self._mine if part not in self._beside]
        recvs = [
            Recv(self._hosts.counterpart(self._rank, host), self._arrived(index, host))
            for host in self._hosts.others(self._host)
        ]
        return Exchange(tuple(sends), tuple(recvs))

    def _fold_hosts(self, index: int) -> Fold:
        pieces = [
            self._partial(index, self._rank) if host == self._host else self._arrived(index, host)
            for host in range(self._hosts.count)
        ]
        return Fold(target(*self._stretch(index, self._rank)), tuple(pieces))
