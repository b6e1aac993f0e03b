"""The one way to wait, at a store, until all ranks have come.

A rank that comes sets a key of its own. Whoever waits for keys calls `arrive`: it returns as soon as they are
set or the deadline has passed, and looks for failures in between. `absent` then names those that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from dist2.runtime.deadline import remaining_s

_LOOK_S = 0.05
"""How long a wait lasts between two looks for failures."""
_SHORTEST_S = 0.001
"""Stores take a timeout of zero as no limit."""

Look = Callable[[], None]
"""Called many times a second while a rank waits; what it raises ends the wait."""


def arrive(store: Store, keys: Sequence[str], deadline_ns: int, look: Look) -> bool:
    """Wait until all keys are set; return whether they were before the deadline."""
    wanted = list(keys)
    while (left_s := remaining_s(deadline_ns)) > 0:
        look()
        try:
            store.wait(wanted, timedelta(seconds=max(_SHORTEST_S, min(left_s, _LOOK_S))))
        except RuntimeError:  # torch's stores have no type of their own for a timeout
            if store.check(wanted):
                return True
        else:
            return True
    return bool(store.check(wanted))


def absent(store: Store, key_of: Callable[[int], str], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose keys are not set."""
    return [rank for rank in ranks if not store.check([key_of(rank)])]
