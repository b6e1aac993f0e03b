"""Reductions over several hosts whose ranks read each other's tensors: no slots, three fences.

As in `hosts_reducing.py`, a vector is cut into rails; a rank folds its own rail out of the tensors of its
host, exchanges it with the carriers of the same rail on the other hosts, and folds their results in the order
of hosts. Here it reads the other ranks' tensors directly, and in the end the results of the other rails from
their carriers' tensors, as in `mapped.py`. A rail goes piece by piece, each a message: while some are on
the wire, others are folded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dist2.backends.socket.algorithms.hosts import host_map
from dist2.backends.socket.algorithms.schedule import (
    Buffer,
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
from dist2.backends.socket.algorithms.spans import assemble, lent, scratch, source, target

LAG = 2
"""How many pieces are on the wire while the next is folded."""
PLACES = LAG + 1
"""Number of pieces with a receive buffer: those in flight and one that is folded."""


def all_reduce_whole(rank: int, layout: tuple[int, ...], numel: int, piece: int) -> Schedule:
    """Send the own rail to its carriers on all hosts, which all fold it: for two hosts."""
    return _Reducing(rank, layout, numel, piece, chunked=False).schedule()


def all_reduce_direct(rank: int, layout: tuple[int, ...], numel: int, piece: int) -> Schedule:
    """Send chunks of each piece to the host that owns them, which folds and sends to all."""
    return _Reducing(rank, layout, numel, piece, chunked=True).schedule()


class _Piece(NamedTuple):
    """A piece of a rail.

    Attributes:
        number: The piece's number among those of all rails.
        rail: Number of the rail.
        start: First element.
        stop: One past the last.
    """

    number: int
    rail: int
    start: int
    stop: int


class _Reducing:
    """Builds the schedule of one rank.

    Args:
        piece: Elements of a rail that are sent at a time.
        chunked: Each host folds a chunk of each piece, not all of it.
    """

    def __init__(self, rank: int, layout: tuple[int, ...], numel: int, piece: int, *, chunked: bool) -> None:
        self._rank = rank
        self._numel = numel
        self._hosts = host_map(layout)
        self._host = self._hosts.of[rank]
        self._beside = self._hosts.beside(rank)
        self._chunked = chunked
        self._others = self._hosts.others(self._host)
        self._stride = max(1, piece)
        self._bounds = bounds = chunk_bounds(numel, self._hosts.rails)
        cuts = [
            (rail, start, min(start + self._stride, bounds[rail + 1]))
            for rail in range(self._hosts.rails)
            for start in range(bounds[rail], bounds[rail + 1], self._stride)
        ]
        rails = self._hosts.rails_of(rank)
        self._pieces = [_Piece(number, *cut) for number, cut in enumerate(cuts) if cut[0] in rails]
        longest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        self._longest = -(-longest // self._hosts.count) if chunked else longest

    def schedule(self) -> Schedule:
        """Return it."""
        together: list[Step] = [Fence()] if len(self._beside) > 1 else []
        steps: list[Step] = [Copy(target(0, self._numel), source(0, self._numel)), *together]
        for _, stage, piece in sorted(self._turns()):
            steps += (self._enter, self._fold_hosts)[stage](piece)
        if together:
            steps += [Fence(), *self._results(), Fence()]
        places = PLACES * len(self._others) * self._longest
        return assemble(steps, scratch=places, lends=Buffer.OUTPUT if together else None)

    def _turns(self) -> Iterator[tuple[int, int, _Piece]]:
        """Yield the steps of pieces in an order that is the same on all ranks, with any rails."""
        for piece in self._pieces:
            for stage in range(2):
                yield piece.number + stage * LAG, stage, piece

    # Places

    def _chunk(self, host: int, piece: _Piece) -> tuple[int, int]:
        """Return which elements of a piece a host folds."""
        if not self._chunked:
            return piece.start, piece.stop
        bounds = chunk_bounds(piece.stop - piece.start, self._hosts.count)
        return piece.start + bounds[host], piece.start + bounds[host + 1]

    def _arrived(self, piece: _Piece, turn: int) -> Span:
        """Return where the partial result of another host goes: the ``turn``-th of them."""
        low, high = self._chunk(self._host, piece)
        at = (piece.number % PLACES * len(self._others) + turn) * self._longest
        return scratch(at, at + high - low)

    def _carrier(self, host: int, piece: _Piece) -> int:
        return self._hosts.carrier(host, piece.rail)

    # Stages

    def _enter(self, piece: _Piece) -> list[Step]:
        """Fold the parts of a piece on this host's ranks, to where the result will be, and send that."""
        if len(self._beside) == 1:
            return [self._contribute(piece)]
        mine = target(piece.start, piece.stop)
        spans = [
            mine if each == self._rank else lent(each, 0, piece.start, piece.stop) for each in self._beside
        ]
        return [Fold(mine, tuple(spans), final=False), self._contribute(piece)]

    def _contribute(self, piece: _Piece) -> Exchange:
        """Exchange partial results with the other hosts."""
        sends, recvs = [], []
        for turn, host in enumerate(self._others):
            peer = self._carrier(host, piece)
            sends.append(Send(peer, target(*self._chunk(host, piece))))
            recvs.append(Recv(peer, self._arrived(piece, turn)))
        return Exchange(tuple(sends), tuple(recvs))

    def _fold_hosts(self, piece: _Piece) -> list[Step]:
        """Fold the hosts' parts, in their order; where each host has a chunk, exchange the results."""
        mine = target(*self._chunk(self._host, piece))
        spans = {host: self._arrived(piece, turn) for turn, host in enumerate(self._others)}
        spans[self._host] = mine
        ordered = [spans[host] for host in range(self._hosts.count)]
        steps: list[Step] = [Fold(mine, tuple(ordered))]
        if self._chunked:
            peers = [(host, self._carrier(host, piece)) for host in self._others]
            sends = [Send(peer, mine) for _, peer in peers]
            recvs = [Recv(peer, target(*self._chunk(host, piece))) for host, peer in peers]
            steps.append(Exchange(tuple(sends), tuple(recvs)))
        return steps

    def _results(self) -> list[Step]:
        """Copy the rails that other ranks of this host carried."""
        return [
            Copy(target(low, high), lent(peer, 0, low, high))
            for peer in self._beside
            if peer != self._rank
            for low, high in [self._bounds[rail : rail + 2] for rail in self._hosts.rails_of(peer)]
        ]
