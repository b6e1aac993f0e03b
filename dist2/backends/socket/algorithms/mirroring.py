"""A schedule run backwards, to touch first the memory that the previous call touched last.

A cache keeps the data that were touched last. A call on tensors that are longer than the cache, in the same
order as the call before, finds nothing in it: its data were evicted a moment earlier. In the opposite order
it finds as much as the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Schedule, Step


def mirrored(schedule: Schedule) -> Schedule | None:
    """Return a schedule that does the same in the opposite order; None if there is none.

    There is one if a schedule only copies out of and into exposed memory, between two fences: then no copy
    needs another. A rank's copies to itself may come before the first fence if no other rank accesses its
    output, so the copies before the first fence and the last ones before the second change places. Some ranks
    may run one of the two schedules while others run the other.
    """
    steps = schedule.steps
    fences = [at for at, step in enumerate(steps) if isinstance(step, Fence)]
    copies = [step for step in steps if isinstance(step, Copy)]
    if schedule.slot or len(fences) != 2 or steps[-1] is not steps[fences[-1]]:
        return None
    if len(fences) + len(copies) < len(steps):
        return None
    before, between = copies[: fences[0]], copies[fences[0] :]
    own = len(between)
    while schedule.lends is Buffer.INPUT and own and between[own - 1].is_own:
        own -= 1
    opening, closing = steps[fences[0]], steps[fences[1]]
    turned: tuple[Step, ...] = (
        *_backwards(between[own:]),
        opening,
        *_backwards(between[:own]),
        *_backwards(before),
        closing,
    )
    return attrs.evolve(schedule, steps=turned)


def _backwards(copies: Sequence[Copy]) -> list[Copy]:
    return [attrs.evolve(copy, backwards=not copy.backwards) for copy in reversed(copies)]
