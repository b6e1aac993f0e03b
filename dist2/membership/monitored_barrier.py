"""A barrier through the store that tells who is missing, whatever state data links are in."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store

from dist2.errors import OperationTimeoutError, rank_names
from dist2.operation.signature import GroupInfo
from dist2.rendezvous.waiting import Look, absent, arrive
from dist2.runtime.deadline import deadline_in

_GRACE = 1.1


def monitored_barrier(
    info: GroupInfo,
    store: Store,
    nth: int,
    timeout_s: float,
    wait_all_ranks: bool,
    look: Look = lambda: None,
    last_seen: Callable[[list[int]], dict[int, str]] = lambda ranks: {},
) -> None:
    """Return when all ranks of a group have called for the ``nth`` time.

    Rank 0 collects arrivals, then lets everyone go, or tells everyone who was missing.

    Args:
        info: The group.
        store: Its own.
        nth: Counts the calls.
        timeout_s: Limit.
        wait_all_ranks: Name all missing ranks instead of the first.
        look: Called many times a second meanwhile; what it raises ends the wait.
        last_seen: Says what the missing were last seen at.

    Raises:
        OperationTimeoutError: On every rank that is here: `missing` names those that are not.
    """
    prefix = f"monitored_barrier/{nth}"
    deadline_ns = deadline_in(timeout_s)
    store.set(f"{prefix}/{info.rank}", "here")
    if info.rank == 0:
        missing = _missing(store, prefix, info.world_size, deadline_ns, wait_all_ranks, look)
        store.set(f"{prefix}/verdict", ",".join(map(str, missing)))
    else:
        missing = _verdict(store, prefix, timeout_s, look)
    if missing:
        names = ", ".join(map(str, missing))
        seen = last_seen(missing)
        raise OperationTimeoutError(
            f"monitored_barrier of group {info.name!r}: {rank_names(missing)} did not arrive "
            f"within {timeout_s} s "
            f"(Ranks failed to pass the barrier: {names}){seen_at(seen)}",
            missing=missing,
            last_seen=seen,
            timeout_s=timeout_s,
            group=info.name,
            op="monitored_barrier",
            rank=info.rank,
        )


def seen_at(seen: dict[int, str]) -> str:
    """Return what ranks were last seen at as a part of a message; empty if that is not known."""
    words = "; ".join(f"rank {rank}: {what}" for rank, what in seen.items())
    return f" (last seen at: {words})" if words else ""


def _missing(
    store: Store, prefix: str, world_size: int, deadline_ns: int, wait_all: bool, look: Look
) -> list[int]:
    keys = {rank: f"{prefix}/{rank}" for rank in range(1, world_size)}
    if arrive(store, list(keys.values()), deadline_ns, look):
        return []
    missing = absent(store, keys.__getitem__, list(keys))
    return missing if wait_all else missing[:1]


def _verdict(store: Store, prefix: str, timeout_s: float, look: Look) -> list[int]:
    """Return what rank 0 found. If it came late, it may spend its whole limit from then on."""
    key = f"{prefix}/verdict"
    if not arrive(store, [key], deadline_in(timeout_s * _GRACE), look):
        came = store.check([f"{prefix}/0"])
        if not (came and arrive(store, [key], deadline_in(timeout_s * _GRACE), look)):
            return [0]
    text = store.get(key).decode()
    return [int(rank) for rank in text.split(",") if rank]
