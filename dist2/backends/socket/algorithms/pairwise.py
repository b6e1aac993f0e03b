"""Pairwise exchange: ``W-1`` rounds, in round d with the ranks at distance d; one message in flight each way.

For `all_to_all` of many ranks or large parts, where sending all at once would crowd the receivers. A
rank that runs `direct.all_to_all` instead matches it: the messages are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.algorithms.schedule import Copy, Schedule, Step
from dist2.backends.socket.algorithms.spans import assemble, exchange, offsets_of, source, target


def all_to_all(rank: int, world_size: int, sent: Sequence[int], received: Sequence[int]) -> Schedule:
    """Send each part to its rank; sizes may differ by pair."""
    outgoing, incoming = offsets_of(sent), offsets_of(received)
    steps: list[Step] = [Copy(target(*incoming[rank : rank + 2]), source(*outgoing[rank : rank + 2]))]
    for distance in range(1, world_size):
        to, of = (rank + distance) % world_size, (rank - distance) % world_size
        steps.append(exchange(to, source(*outgoing[to : to + 2]), of, target(*incoming[of : of + 2])))
    return assemble(steps, sizes_known=False)
