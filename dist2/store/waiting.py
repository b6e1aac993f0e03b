"""The one way to wait, at a store, for other ranks.

Each rank sets its key. The others call `arrive` with the keys that they need: it returns as
soon as all are set, or when the deadline has passed; `absent` then names the ranks with missing keys.
Meanwhile it calls a function that raises to end the wait: a rank has failed or died, or the group was
aborted here. Rendezvous, `new_group`, merge, the monitored barrier and collectives over a store use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch.distributed import Store as TorchStore

from dist2.errors import Dist2Error, PeerLostError, StoreTimeoutError
from dist2.runtime.deadline import Deadline
from dist2.store.base import Store, limit_of, without_prefixes

_LOOK_S = 0.05
"""Interval between two looks for failures during a wait, in seconds, by default."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0003, 0.05

Look = Callable[[], None]
"""Called again and again while a rank waits; it raises to end the wait."""


def arrive(
    store: TorchStore,
    keys: Sequence[str],
    deadline: Deadline,
    look: Look | None = None,
    look_s: float = _LOOK_S,
) -> bool:
    """Wait until all keys are set; return whether they were before the deadline.

    Args:
        store: Any store, dist2's or torch's.
        keys: The keys to wait for.
        deadline: When to give up.
        look: Called after each ``look_s`` of waiting, and at the deadline.
        look_s: Seconds.
    """
    wanted = list(keys)
    if look is None:
        return _are_set_by(store, wanted, deadline)
    by = _are_set_by if isinstance(without_prefixes(store), Store) else _are_found_by
    while not by(store, wanted, deadline.soon(look_s)):
        try:
            look()
        except PeerLostError:  # the rank may have set its key before it ended
            if store.check(wanted):
                return True
            raise
        if deadline.passed:
            return bool(store.check(wanted))
    return True


def absent(store: TorchStore, key_of: Callable[[int], str], ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose keys are not set."""
    return [rank for rank in ranks if not store.check([key_of(rank)])]


def fetch(store: TorchStore, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys that are known to be set."""
    return store.fetch(keys) if isinstance(store, Store) else list(store.multi_get(list(keys)))


def _are_set_by(store: TorchStore, keys: list[str], deadline: Deadline) -> bool:
    try:
        store.wait(keys, limit_of(deadline))
    except StoreTimeoutError:
        return False
    except RuntimeError as error:  # torch's stores have no special type for a timeout
        if isinstance(error, Dist2Error) or not deadline.passed:
            raise
        return False
    return True


def _are_found_by(store: TorchStore, keys: list[str], deadline: Deadline) -> bool:
    """Poll: torch's TCPStore complains on stderr of each wait that ends without the keys."""
    return any(store.check(keys) for _ in deadline.tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S))
