"""Joining: the ranks of a new group register in a store, and check that they want the same group.

Theory of operation: the n-th group of a store is built in its n-th part. Each rank sets its request there,
and the first one also sets it under a key that all know. Each rank compares this request with its own. The
last rank with an equal request sets `GO`, and all proceed. A rank that finds a difference, or whose deadline
passes, sets `GO` to the reason instead. `GO` is set once and all wait for it, so all learn of it at once.
Failures after that are published too, while the group is built: see `FailureWatch`.

No rank leads here, and there are no generations as at an endpoint (`session`): the users of a store count its
groups alike, so that all ranks know the part beforehand. At an endpoint the store may hold requests and
verdicts of runs that have ended, and a rank that starts has no count that tells them from those of its own
run: only the announcement of the rank 0 that runs does. The requests, the verdict, its acknowledgement and
the exceptions are the same (`requests`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store

from dist2.errors import RendezvousError, StoreTimeoutError, WireError
from dist2.rendezvous.liveness import FailureWatch, LivenessMonitor
from dist2.rendezvous.requests import (
    GO,
    PROCEED,
    JoinRequest,
    Outcome,
    Verdict,
    ack_key,
    acknowledge,
    cannot_come,
    decide,
    error_of,
    part_of,
    rank_key,
    request_of,
    started_twice,
    too_late,
)
from dist2.runtime.arguments import difference_of
from dist2.runtime.deadline import Deadline
from dist2.runtime.other_process import Process
from dist2.store import PrefixStore
from dist2.store.waiting import arrive

_FIRST, _AGREED = "first", "agreed"
_SOON_S = 2.0
"""Time to wait for a sign of life of another process with this rank, in seconds; or for another thread."""


def join_group(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    asked: Mapping[str, str],
    name: str | None = None,
    roll: LivenessMonitor | None = None,
) -> FailureWatch:
    """Register for the next group of a store; return its part, for a `with` block in which it is built.

    Args:
        store: The common store. It may serve many groups: each rank counts its calls, and the n-th calls of
            all ranks belong together. Where `roll` is given, the store is for this group alone.
        rank: The caller's.
        world_size: Number of ranks that it expects.
        timeout_s: Limit of each wait for the others, in seconds.
        asked: Its arguments besides `world_size`.
        name: The group's, if it has one.
        roll: The processes of the ranks, if they have met before.

    Raises:
        RendezvousError: Two processes have this rank, or two threads of this process.
    """
    nth = 1 if roll is not None else store.add(f"dist2/joined/{rank}", 1)
    if nth > 1:
        _look_back(part_of(store, nth - 1), rank)
    asked = {**asked, "world_size": repr(world_size)}
    watch = FailureWatch(f"dist2/{nth}", store, rank, world_size, name, asked, roll)
    watch.set_timeout(timedelta(seconds=timeout_s))
    return watch


def agree(watch: FailureWatch, timeout_s: float) -> str:
    """Return an id that the group has on all ranks, and no other group of any job.

    Args:
        watch: The result of `join_group`.
        timeout_s: As given there.

    Raises:
        InvalidUsageError: Arguments differ between ranks.
        RendezvousError: Two processes have the same rank.
        OperationTimeoutError: Ranks did not arrive; `missing` has them.
        PeerLostError: One failed or died.
    """
    world_size = watch.world_size
    text = watch.compare_set(_FIRST, "", watch.request.to_text())
    first = JoinRequest.read(text)
    if first is None:
        raise WireError(f"no request of a rank that builds a group: {text[:100]!r}")
    watch.building.uid = first.token
    if first.asked != watch.request.asked:
        verdict = Verdict(Outcome.MISMATCH, _difference(watch))
        if decide(watch, verdict).outcome is Outcome.PROCEED:  # the others proceed without this one
            raise error_of(verdict, timeout_s)
    elif watch.add(_AGREED, 1) == world_size:
        decide(watch, PROCEED)
    try:
        decided = Verdict.read(watch.get(GO))
    except StoreTimeoutError:
        decided = decide(watch, too_late(watch, range(world_size), world_size, timeout_s))
    if decided.outcome is not Outcome.PROCEED:
        acknowledge(watch, watch.rank)
        raise error_of(decided, timeout_s)
    return first.token


def _difference(watch: FailureWatch) -> str:
    """Return the arguments that differ between the ranks that have registered."""
    requests = {rank: request_of(watch, rank) for rank in range(watch.world_size)}
    requests[watch.rank] = watch.request
    asked = {rank: request.asked for rank, request in requests.items() if request is not None}
    return difference_of(asked) or "ranks ask for different groups"


def _look_back(part: PrefixStore, rank: int) -> None:
    """Find out whether another process has this rank too, and tell the ranks that wait for it.

    A rank that registers a second time has finished the first time. If that part is undecided, the other
    registration is that of another process, which waits or has died. If it has died, ranks may still
    wait in that part; they must learn of it.

    So is that of another thread of this process: a call that has ended has decided.

    Raises:
        RendezvousError: The other process is alive, or is this one.
    """
    if part.check([GO]) or not arrive(part, [rank_key(rank)], Deadline.after(_SOON_S)):
        return
    request, here = request_of(part, rank), Process.here()
    other = None if request is None else request.process
    if other == here and arrive(part, [GO], Deadline.after(_SOON_S)):
        return  # threads of this rank make groups one after the other
    verdict = started_twice(rank, request, here)
    decide(part, verdict)
    if other is not None and other.has_ended:
        return
    lives = other is not None and (other == here or other.is_another_here)
    if lives or arrive(part, [ack_key(rank)], Deadline.after(_SOON_S)):
        raise RendezvousError(verdict.words, op="new_group", rank=rank)


def object_to(store: Store, words: str) -> None:
    """Tell the ranks that build a group in a store, now or next, why one of them does not join."""
    nth = 1
    while (part := part_of(store, nth)).check([GO]):
        nth += 1
    decide(part, cannot_come(words))
