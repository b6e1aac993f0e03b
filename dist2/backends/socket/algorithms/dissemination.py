"""The dissemination barrier: in round k each rank signals the rank at distance ``2**k``.

After ``ceil(log2 W)`` rounds of empty messages each rank has a signal from every other, directly or
indirectly.

Source: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
Program. 17 (1988).
"""

from __future__ import annotations

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.algorithms.spans import exchange, scratch


def barrier(rank: int, world_size: int) -> Schedule:
    """Return when all ranks have called."""
    nothing = scratch(0, 0)
    steps = []
    distance = 1
    while distance < world_size:
        to, of = (rank + distance) % world_size, (rank - distance) % world_size
        steps.append(exchange(to, nothing, of, nothing))
        distance *= 2
    return Schedule(tuple(steps))
