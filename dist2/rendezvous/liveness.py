"""Detection of dead ranks during a rendezvous, and reports of failures to waiting ranks.

Each rank writes a `JoinRequest` with its process into the store. A `LivenessMonitor` reads
these and finds the processes of its host that have ended. A `FailureWatch` is the part of a store in
which one group is built: each wait in it also looks for failures that other ranks have reported and for dead
processes, and publishes them, so that all ranks raise the same error.

The key `GO` is not set at first. It becomes `PROCEED` when all ranks ask for the same group, and the reason
of the failure as soon as one of them fails; a reason is final.

While a call waits for other ranks to make a group, at an endpoint or in a store, it is listed as a
`Building`: other threads of the process abort it there, and read which ranks have registered.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self

import attrs
from torch.distributed import Store

from dist2.errors import (
    Dist2Error,
    OperationTimeoutError,
    PeerLostError,
    StoreConnectionError,
    StoreTimeoutError,
)
from dist2.rendezvous.requests import (
    GO,
    JoinRequest,
    Outcome,
    Verdict,
    publish_failure,
    rank_key,
    request_of,
)
from dist2.runtime.deadline import Deadline
from dist2.runtime.other_process import Process, has_ended, how_ended
from dist2.runtime.rank_names import RANKS, RankNames
from dist2.store.base import limit_of, wait_timed_out
from dist2.store.prefix import PrefixStore
from dist2.store.text import as_name
from dist2.store.waiting import arrive

UNSURE_LOOKS = 3
"""Looks at which a rank that does not know how a process ended leaves it to another one to tell."""
_READS = 16
"""Number of keys of missing ranks that are read at a time: thousands would keep the store busy."""
_LAST_WORDS = timedelta(seconds=1)
"""Limit of each request by which a rank tells why a group cannot be built, if the store seems to be lost."""
_LOOK_S = 0.2
"""Interval between a rank's queries for failures, in seconds: 64 ranks query equally often."""


class LivenessMonitor:
    """The processes of ranks, read as they register. To be polled while waiting for them.

    Args:
        store: Where each rank has its request.
        rank: The caller's.
        world_size: Number of ranks.
        known: Requests that the caller has read already.
        names: Names the ranks in texts.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        known: Mapping[int, JoinRequest] | None = None,
        names: RankNames = RANKS,
    ) -> None:
        self._store = store
        self._names = names
        # Each rank begins with the next one: together they soon have checked all.
        self._unread = dict.fromkeys((rank + step) % world_size for step in range(1, world_size))
        self._processes: dict[int, tuple[Process, int]] = {}
        self._unsure: Counter[int] = Counter()
        for other, request in (known or {}).items():
            self._watch(other, request)

    def _watch(self, rank: int, request: JoinRequest) -> None:
        self._unread.pop(rank, None)
        self._processes[rank] = request.process, request.process.watch()

    def _process_of(self, rank: int) -> str:
        known = self._processes.get(rank)
        return "" if known is None else known[0].place

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for _, pidfd in self._processes.values():
            if pidfd >= 0:
                close(pidfd)

    def dead(self) -> tuple[int, str] | None:
        """Return a rank that has died, with a description; None if none is known to be dead."""
        for rank in tuple(self._unread)[:_READS]:
            self._unread.pop(rank, None)
            key = rank_key(rank)
            if self._store.check([key]):
                request = JoinRequest.read(self._store.get(key))
                if request is not None:
                    self._watch(rank, request)
            else:
                self._unread[rank] = None  # after those that were not checked
        return self.seen_dead()

    def seen_dead(self, unsure_looks: int = UNSURE_LOOKS) -> tuple[int, str] | None:
        """Do the same without the store, for the ranks with requests that were read before.

        Args:
            unsure_looks: At so many looks it says nothing of a process that had ended when its request was
                read: a rank that came earlier has watched it, and publishes how it ended.
        """
        for rank, (process, pidfd) in tuple(self._processes.items()):
            if not (has_ended(pidfd) if pidfd >= 0 else process.has_ended):
                continue
            if pidfd < 0:
                self._unsure[rank] += 1
                if self._unsure[rank] <= unsure_looks:
                    continue
            names = attrs.evolve(self._names, process_of=self._process_of)
            return rank, names.ended({rank: how_ended(pidfd)})
        return None


@attrs.define(eq=False)
class Building:
    """A call of this process that waits for other ranks to make a group, in a `with` block.

    Attributes:
        rank: The caller's.
        world_size: Number of ranks.
        name: The group's, if it was given one.
        uid: Equal on all ranks that make the group; empty while that is not known.
        part: Where the ranks register; None while that is not known.
        aborted: Ends the wait at its next look.
        on_failed: Is called before the call raises; None for nothing.
    """

    rank: int
    world_size: int
    name: str | None = None
    uid: str = ""
    part: PrefixStore | None = None
    aborted: Dist2Error | None = None
    on_failed: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self.aborted = None
        _building.add(self)
        for tell in tuple(on_building):
            tell(self)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None and self.on_failed is not None:
            self.on_failed()
        _building.discard(self)
        self.part = None  # a store closes once nothing uses it

    def check(self) -> None:
        """Raise the error of `abort_building`, if this call was aborted."""
        if self.aborted is not None:
            raise self.aborted

    def requests(self) -> dict[int, JoinRequest | None]:
        """Return the request of each rank, None for a rank that has not registered; asks the store.

        Raises:
            RuntimeError: The store has failed.
        """
        part = self.part
        if part is None:  # rank 0 announces it
            return {} if self.rank == 0 else {0: None}
        found = {rank: request_of(part, rank) for rank in range(self.world_size)}
        leader = found.get(0)
        if leader is not None and leader.process.has_ended:  # it may be of an earlier run
            found[0] = None
        return found


class FailureWatch(PrefixStore):
    """A part of a store in which one group is built, in a `with` block of each of its ranks.

    An error of a rank in the block is published to the others. While waiting for keys, a rank polls for
    failures reported by peers and for dead processes on its own host, and publishes those. After the block,
    this is an ordinary part of a store.

    Args:
        prefix: First part of its keys.
        store: Any store.
        rank: The caller's.
        world_size: Number of ranks of the group.
        name: The group's, if it has one.
        asked: The caller's arguments: see `JoinRequest`.
        roll: The processes of the ranks, if they have met before.
        names: Names the ranks in texts.
        lost: Returns the ranks that are known otherwise to have died, and how each ended.

    Attributes:
        rank: The caller's.
        world_size: Number of ranks of the group.
        request: The caller's.
        building: This call, for other threads.
    """

    def __init__(
        self,
        prefix: str,
        store: Store,
        rank: int,
        world_size: int,
        name: str | None = None,
        asked: Mapping[str, str] | None = None,
        roll: LivenessMonitor | None = None,
        names: RankNames = RANKS,
        lost: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        super().__init__(prefix, store)
        self._lost = lost
        self.rank = rank
        self.world_size = world_size
        self._names = names
        group = f"the group of {world_size} ranks" if name is None else f"group {name!r}"
        self._cannot = f"{group} cannot be built"
        self._over = False
        self._parts = PrefixStore(prefix, store)
        # Elsewhere other threads may use the store, with its limit.
        self._is_own: bool = roll is not None or (isinstance(store, FailureWatch) and store._is_own)
        self.building = Building(rank, world_size, name, part=self._parts)
        self._roll = roll or LivenessMonitor(self._parts, rank, world_size, names=names)
        self.request = JoinRequest(Process.here(), asked or {})
        self._parts.set(rank_key(rank), self.request.to_text())

    def __enter__(self) -> Self:
        self.building.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        self.building.__exit__(kind, error, traceback)
        if error is None:
            return
        if isinstance(error, (StoreConnectionError, StoreTimeoutError)):
            self._hurry()
        missing = self._missing() if isinstance(error, StoreTimeoutError) else None
        error = missing or error
        if isinstance(error, PeerLostError) and error.ranks:  # the backend may have seen it first
            self._tell(Verdict(Outcome.LOST, str(error), error.ranks))
        else:
            words = f"{self._names([self.rank])} gave up ({type(error).__name__}: {error})"
            self._tell(Verdict(Outcome.LOST, words, (self.rank,)))
        dead = self._roll.seen_dead(0) if isinstance(error, StoreConnectionError) else None
        if dead is not None:
            error.args = (f"{error}; {dead[1]}",)
        if isinstance(error, Dist2Error):
            error.locate(
                self.building.name or "", "new_group", rank=self.rank, members=self._names.global_ranks
            )
            error.prefix(self._cannot)
        if missing is not None:  # the keys that the backend waited for name no rank
            raise missing

    def _missing(self) -> OperationTimeoutError | None:
        """Return the error that names the ranks that have not begun to make the group; None if all have."""
        with suppress(RuntimeError):  # the store itself may have failed
            missing = [rank for rank in range(self.world_size) if not self._parts.check([rank_key(rank)])]
            if missing:
                return OperationTimeoutError(
                    f"{self._names(missing)} did not arrive in time: all members make the group, with the "
                    f"same backend",
                    missing=missing,
                )
        return None

    def _tell(self, verdict: Verdict) -> None:
        """Publish the reason why the group cannot be built, unless there is one already."""
        with suppress(RuntimeError):  # the store itself may have failed
            publish_failure(self._parts, verdict)

    def _bound(self, deadline: Deadline) -> None:
        """Have a store that does not answer, as its server is stopped, take little longer than is left."""
        if self._is_own:
            self._parts.set_timeout(limit_of(deadline.stretched()))

    def _hurry(self) -> None:
        """Have the last requests to a store that seems to be lost take little time."""
        if self._is_own:
            self.set_timeout(min(self.timeout, _LAST_WORDS) or _LAST_WORDS)

    def _dead(self) -> Verdict | None:
        """Return the verdict on ranks that have died; None if none is known to have."""
        dead = self._roll.dead()
        if dead is not None:
            return Verdict(Outcome.LOST, dead[1], (dead[0],))
        lost = self._lost()
        return Verdict(Outcome.LOST, self._names.ended(lost), tuple(lost)) if lost else None

    def _look(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        """Raise if a rank has failed or died, and has not set these keys before that.

        Raises:
            PeerLostError: It has; the message has the reason.
            Dist2Error: That of `abort_building`.
        """
        self.building.check()
        self._bound(deadline)
        found = self._dead()
        if self._parts.check([GO]):  # a dead rank may have published its reason
            told = Verdict.read(self._parts.get(GO))
            found = found if told.outcome is Outcome.PROCEED else told
        if found is None or self._check(keys):
            return
        self._tell(found)
        raise PeerLostError(found.words, ranks=found.ranks)

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        if self._over:
            super()._wait(keys, deadline)
            return
        limit = self.timeout
        look = partial(self._look, keys, deadline)
        try:
            came = arrive(self._parts, list(map(as_name, keys)), deadline, look, _LOOK_S)
        except (StoreConnectionError, StoreTimeoutError):
            self._hurry()
            raise
        if self._is_own:  # the server answers
            self.set_timeout(limit)
        if not came:
            raise wait_timed_out(keys, deadline)

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        if self._over:
            return super()._get(key, deadline)
        self._wait((key,), deadline)
        return self._fetch((key,), deadline)[0]

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        if self._over:
            return super()._multi_get(keys, deadline)
        self._wait(keys, deadline)
        return self._fetch(keys, deadline)


_building: set[Building] = set()
"""The groups that threads of this process are building."""

on_building: list[Callable[[Building], None]] = []
"""Called as a thread of this process begins to make a group, and may wait for other ranks."""


def building() -> list[Building]:
    """Return the groups that threads of this process are building."""
    return list(_building.copy())


def abort_building(error: Callable[[], Dist2Error], name: str | None = None) -> int:
    """Raise an error in the threads of this process that wait for other ranks to build a group.

    Args:
        error: Returns it, once for each thread.
        name: Only groups that were given this name.

    Returns:
        The number of groups.
    """
    found = [each for each in building() if name in (None, each.name)]
    for each in found:
        each.aborted = error()
    return len(found)
