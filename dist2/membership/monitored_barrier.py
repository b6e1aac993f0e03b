"""A barrier through the store that names missing ranks, independent of the state of data links.

Theory of operation: each rank sets its key. Rank 0 waits for all keys until its deadline, and publishes the
list of missing ranks, empty for success. The others wait for that list; if it does not appear, rank 0 is
missing. They wait longer than their timeout, since rank 0 may have called later than they did.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store

from dist2.errors import OperationTimeoutError
from dist2.operation.signature import GroupInfo
from dist2.runtime.deadline import Deadline
from dist2.runtime.rank_names import RANKS, RankNames
from dist2.store.waiting import Look, absent, arrive

_GRACE = 1.1


def monitored_barrier(
    info: GroupInfo,
    store: Store,
    nth: int,
    timeout_s: float,
    wait_all_ranks: bool,
    look: Look = lambda: None,
    last_seen: Callable[[list[int]], dict[int, str]] = lambda ranks: {},
    names: RankNames = RANKS,
) -> None:
    """Return when all ranks of a group have called for the ``nth`` time.

    Rank 0 collects arrivals, then releases all ranks, or tells them the missing ones.

    Args:
        info: The group.
        store: Its own.
        nth: Counts the calls.
        timeout_s: Limit.
        wait_all_ranks: Name all missing ranks instead of the first.
        look: Called many times a second meanwhile; it raises to end the wait.
        last_seen: Returns the last known operation of each missing rank.
        names: Names the members in texts.

    Raises:
        OperationTimeoutError: On every rank that is here: `missing` names those that are not.
    """
    prefix = f"monitored_barrier/{nth}"
    deadline = Deadline.after(timeout_s)
    store.set(f"{prefix}/{info.rank}", "here")
    if info.rank == 0:
        missing = _missing(store, prefix, info.world_size, deadline, wait_all_ranks, look)
        store.set(f"{prefix}/verdict", ",".join(map(str, missing)))
    else:
        missing = _verdict(store, prefix, timeout_s, look)
    if missing:
        seen = last_seen(missing)
        words = _in_words_of_torch(info, missing, timeout_s)
        raise OperationTimeoutError(
            f"monitored_barrier of group {info.name!r}: {names(missing)} did not arrive "
            f"within {timeout_s} s ({words}){names.last_seen(seen)}",
            missing=missing,
            last_seen=seen,
            timeout_s=timeout_s,
            group=info.name,
            op="monitored_barrier",
            rank=info.rank,
            members=info.global_ranks,
        )


def _in_words_of_torch(info: GroupInfo, missing: list[int], timeout_s: float) -> str:
    """Return the phrase of c10d that programs search for."""
    if info.rank:
        return (
            f"R{info.names([info.rank])[1:]} successfully reached monitoredBarrier, but received errors "
            f"while waiting for send/recv from {info.names([0])}"
        )
    names = f"R{info.names(missing)[1:]}"
    if all(info.global_ranks[rank] == rank for rank in missing):
        names = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{names} failed to pass monitoredBarrier in {timeout_s * 1e3:.0f} ms"


def _missing(
    store: Store, prefix: str, world_size: int, deadline: Deadline, wait_all: bool, look: Look
) -> list[int]:
    keys = {rank: f"{prefix}/{rank}" for rank in range(1, world_size)}
    if arrive(store, list(keys.values()), deadline, look):
        return []
    missing = absent(store, keys.__getitem__, list(keys))
    return missing if wait_all else missing[:1]


def _verdict(store: Store, prefix: str, timeout_s: float, look: Look) -> list[int]:
    """Return rank 0's result. Rank 0 may have called late, and has its full timeout from then on."""
    key = f"{prefix}/verdict"
    if not arrive(store, [key], Deadline.after(timeout_s * _GRACE), look):
        came = store.check([f"{prefix}/0"])
        if not (came and arrive(store, [key], Deadline.after(timeout_s * _GRACE), look)):
            return [0]
    text = store.get(key).decode()
    return [int(rank) for rank in text.split(",") if rank]
