"""Recursive doubling and halving: ranks exchange in pairs at distances 1, 2, 4, ...

Doubling sends the whole vector ``log2 W`` times: fewest messages, for short vectors. Rabenseifner's
algorithm reduces by halving and gathers by doubling: as few bytes as a ring in ``2 log2 W`` messages.
World sizes that are no power of two fold the excess first: of the first ``2 excess`` ranks, each even
one gives its vector to the next and gets the result at the end.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

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
from dist2.backends.socket.algorithms.spans import assemble, exchange, scratch, source, target


def all_reduce_doubling(rank: int, world_size: int, numel: int) -> Schedule:
    """Exchange and fold whole vectors at doubling distances."""
    return _with_excess(rank, world_size, numel, _doubling_steps)


def all_reduce_halving(rank: int, world_size: int, numel: int) -> Schedule:
    """Reduce-scatter by recursive halving, then gather by recursive doubling (Rabenseifner)."""
    return _with_excess(rank, world_size, numel, _halving_steps)


@attrs.frozen
class _Core:
    """The ranks that remain after the excess is folded: a power of two of them.

    Attributes:
        size: How many.
        excess: How many ranks were folded into their neighbours.
        position: This rank's number among them.
    """

    size: int
    excess: int
    position: int

    def rank_of(self, position: int) -> int:
        """Return the group rank of a member of the core."""
        return 2 * position + 1 if position < self.excess else position + self.excess


_CoreSteps = Callable[[_Core, int, Callable[[int, int], Span]], list[Step]]


def _with_excess(rank: int, world_size: int, numel: int, core_steps: _CoreSteps) -> Schedule:
    if world_size == 1:
        return assemble([Copy(target(0, numel), source(0, numel))])
    size = 1 << (world_size.bit_length() - 1)
    excess = world_size - size
    whole, received = target(0, numel), scratch(0, numel)
    if rank >= 2 * excess:
        steps = core_steps(_Core(size, excess, rank - excess), numel, source)
    elif rank % 2:
        first: list[Step] = [
            Exchange(recvs=(Recv(rank - 1, received),)),
            Fold(whole, (received, source(0, numel)), final=False),
        ]
        core = core_steps(_Core(size, excess, rank // 2), numel, target)
        steps = [*first, *core, Exchange(sends=(Send(rank - 1, whole),))]
    else:
        steps = [
            Exchange(sends=(Send(rank + 1, source(0, numel)),)),
            Exchange(recvs=(Recv(rank + 1, whole),)),
        ]
    return assemble(steps, scratch=numel)


def _doubling_steps(core: _Core, numel: int, own: Callable[[int, int], Span]) -> list[Step]:
    steps: list[Step] = []
    received, mine = scratch(0, numel), own(0, numel)
    distance = 1
    while distance < core.size:
        partner = core.rank_of(core.position ^ distance)
        steps.append(exchange(partner, mine, partner, received))
        # The lower position stands on the left, so that both compute the same.
        pair = (mine, received) if core.position & distance == 0 else (received, mine)
        distance *= 2
        steps.append(Fold(target(0, numel), pair, final=distance == core.size))
        mine = target(0, numel)
    return steps


def _halving_steps(core: _Core, numel: int, own: Callable[[int, int], Span]) -> list[Step]:
    bounds = chunk_bounds(numel, core.size)
    reducing: list[Step] = []
    gathering: list[Step] = []
    low, high = 0, core.size
    distance = core.size // 2
    while distance:
        partner = core.rank_of(core.position ^ distance)
        middle = low + distance
        halves = [(low, middle), (middle, high)]
        (kept_low, kept_high) = halves.pop(core.position & distance != 0)
        ((sent_low, sent_high),) = halves
        kept, sent = (bounds[kept_low], bounds[kept_high]), (bounds[sent_low], bounds[sent_high])
        received = scratch(0, kept[1] - kept[0])
        reducing.append(exchange(partner, own(*sent), partner, received))
        reducing.append(Fold(target(*kept), (received, own(*kept)), final=distance == 1))
        gathering.append(exchange(partner, target(*kept), partner, target(*sent)))
        own, low, high = target, kept_low, kept_high
        distance //= 2
    return reducing + gathering[::-1]
