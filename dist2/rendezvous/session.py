"""Rendezvous of ranks in a store, any number of times, with any content that earlier runs left in it.

Theory of operation: a store may outlive its users: torchrun's agent keeps its store over restarts of all
ranks, and a file stays after a crash. So rank 0 starts a *generation* with a name that was never used, and
announces it; the others register in the announced one, until rank 0 has all requests and sets go. An earlier
generation cannot accept them: it has a request of their rank already.

A rank that finds a fault with a generation (its rank taken by another process, another world size) sets the
verdict in place of rank 0. Rank 0, if it still runs, reads that and acknowledges it. A verdict may be of an
earlier run, so a rank raises it only if it knows that the leader runs, or has run since the rank registered.
The timeout of a leader is never final: the launcher may start another rank 0.

Within a generation, ranks count their meetings, and the n-th meeting has a part of the store. The
session remembers that as long as the process runs; the connection lives only as long as a store uses it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import secrets
import socket
import threading
import time
from contextlib import closing, suppress
from datetime import timedelta
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import attrs

from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    RendezvousError,
    StoreConnectionError,
    StoreConnectTimeoutError,
    StoreError,
    WireError,
)
from dist2.rendezvous.joining import object_to
from dist2.rendezvous.liveness import Building, LivenessMonitor
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
    two_threads,
)
from dist2.runtime.config import environment_value
from dist2.runtime.deadline import Deadline
from dist2.runtime.other_process import Process
from dist2.runtime.rank_names import rank_names
from dist2.runtime.threads import lock_with_timeout
from dist2.store.base import Store, limit_of
from dist2.store.prefix import PrefixStore
from dist2.store.waiting import absent, arrive

log = logging.getLogger("dist2.rendezvous")

_LEADER = "dist2/leader"
_LOOK_AGAIN_S = 0.2
"""Time that a rank waits for go before it checks for a new generation, in seconds."""
_NEXT_SERVER_S = 1.0
"""Time to look for another server after one closed before rank 0 had announced a generation, in seconds."""
_WARN_S = 10.0
"""Time before a waiting rank logs the missing ranks, in seconds; then it doubles."""
_TELL_S = 2.0
"""Time that a failing rank waits for the others to learn of it, in seconds."""
_TELL_LATE_S = 0.5
"""The same after its limit: ranks that are not stopped learn of it within a millisecond."""
_LISTENS_S = 2.0
"""Interval between two looks whether a call was aborted, while no server listens, in seconds."""
_MORE = 1.5
"""How much longer the next interval is if a server may be there that needs more time than this one."""
_GAVE_UP = "rank 0 gave up: "
"""Begin of the reason to wait when rank 0's deadline has passed: another rank 0 may be started."""
_ANNOUNCED = "rank 0 has announced itself"


class Endpoint(Protocol):
    """A place where ranks meet. Equal endpoints are the same place."""

    def __hash__(self) -> int: ...

    def __str__(self) -> str:
        """Name it, for messages."""

    @property
    def ends_with_rank_0(self) -> bool:
        """Whether the store lives no longer than the process of rank 0."""

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the store there; rank 0 may have to make it."""


class _ClosedEarlyError(RendezvousError):
    """The server closed before rank 0 had announced itself there."""


class _InVainError(Exception):
    """The generation that this rank leads has failed.

    Args:
        verdict: The reason.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.words)
        self.verdict = verdict


class RendezvousSession:
    """The rendezvous of one rank at one endpoint, in this process."""

    def __init__(self, endpoint: Endpoint, rank: int, world_size: int) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.RLock()
        self._generation: str | None = None
        self._rounds = 0
        self._request = self._new_request()
        self._in_time_for: str | None = None
        self._leader: JoinRequest | None = None
        self._rival: Verdict | None = None
        self._known: dict[int, JoinRequest] = {}
        self._building = Building(rank, world_size, uid=_uid_of(endpoint, world_size))
        self._began_s, self._warn_s = 0.0, _WARN_S
        self._opened: ReferenceType[Store] | None = None
        # Stores that were given out keep a reference to the store of which they are clones.
        self._kept: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()

    def stay_away(self, words: str) -> None:
        """Tell the other ranks, which meet once more, why this process does not come as this rank."""
        with lock_with_timeout(self._lock, 0.0) as mine:
            if mine:  # else it is coming
                store = self._open(Deadline.after(_TELL_S))
                self._rounds += 1  # as if it had come
                object_to(PrefixStore(f"dist2/{self._generation}/{self._rounds}", store), words)

    def _new_request(self) -> JoinRequest:
        return JoinRequest(Process.here(), {"world_size": str(self._world_size)})

    def come(self, timeout: timedelta) -> tuple[Store, LivenessMonitor]:
        """Meet the other ranks once more; return a store for this meeting alone.

        Raises:
            RendezvousError: Ranks are missing, a rank is taken (by a thread, too), or world sizes differ.
            StoreError: The store cannot be reached, made or used.
        """
        deadline = Deadline.after(timeout)
        patience = deadline.soon(_TELL_S) if self._generation is None else deadline
        with lock_with_timeout(self._lock, patience.remaining_s()) as mine:
            if not mine:
                self._rival = two_threads(self._rank, self._request.process)
                raise self._failure(self._rival, deadline)
            with self._building:
                store = self._open(deadline)
                if self._generation is None:
                    store.set_timeout(timeout)
                    self._request = self._new_request()
                    self._known, self._rival, self._building.part = {}, None, None
                    self._began_s, self._warn_s = time.monotonic(), _WARN_S
                    if self._rank == 0:
                        self._generation = self._lead(store, deadline)
                    else:
                        store, self._generation = self._follow_the_current(store, deadline)
                    self._rounds = 0
            self._rounds += 1
            clone = store.clone()
            self._kept[clone] = store
            part = part_of(clone, self._generation)
            monitor = LivenessMonitor(part, self._rank, self._world_size, self._known)
        clone.set_timeout(timeout)
        return PrefixStore(f"dist2/{self._generation}/{self._rounds}", clone), monitor

    def _open(self, deadline: Deadline) -> Store:
        """Return the store that is open, or open it; forget a generation that it does not know."""
        store = self._opened() if self._opened is not None else None
        if store is not None:
            try:
                store.num_keys()
            except StoreError as error:  # its server went away; rank 0 may have made another
                log.info("%s: rank %s connects to the store again: %s", self._endpoint, self._rank, error)
                store = None
        if store is None:
            try:
                store = self._reached(deadline)
            except StoreConnectionError as error:
                if self._rank == 0 and _is_taken(error):
                    self._object_to_host(error)
                raise
            self._opened = ref(store)
            if self._generation is not None and not part_of(store, self._generation).check([GO]):
                self._generation = None
        return store

    def _reached(self, deadline: Deadline) -> Store:
        """Return the store, once its server answers; look again and again whether this call was aborted."""
        slice_s = _LISTENS_S
        while True:
            self._building.check()
            limit = limit_of(deadline.soon(slice_s))
            try:
                return self._endpoint.open(self._rank, self._world_size, limit)
            except StoreConnectTimeoutError as error:
                if deadline.passed:
                    error.args = (f"no store answered within {deadline.timeout_s:g} s: {error}",)
                    raise
                if not _is_absent(error):  # it may be slow
                    slice_s *= _MORE

    def _object_to_host(self, error: StoreConnectionError) -> None:
        """Tell another rank 0, if it has the address that this rank 0 finds taken."""
        deadline = Deadline.after(_TELL_S)
        with suppress(StoreError, WireError), closing(_joined(self._endpoint, deadline)) as store:
            if arrive(store, [_LEADER], deadline):
                words = self._object(_current(store), 0).words
                raise RendezvousError(f"{self._endpoint}: {words}; or do two jobs meet there?") from error

    def _lead(self, store: Store, deadline: Deadline) -> str:
        if store.check([_LEADER]):
            before = _current(store)
            found = request_of(before, 0)
            if found is not None and found.process.is_another_here:
                raise self._failure(self._object(before, 0), deadline)
        generation = secrets.token_hex(8)
        self._building.part = part = part_of(store, generation)
        part.set(rank_key(0), self._request.to_text())
        store.set(_LEADER, generation)
        try:
            self._gather(store, part, generation, deadline)
            verdict = decide(part, PROCEED)
        except _InVainError as error:
            verdict = decide(part, error.verdict)
        except GroupAbortedError as error:
            decide(part, Verdict(Outcome.LOST, f"rank 0 gave up: {error}", (0,)))
            raise
        if verdict.outcome is not Outcome.PROCEED:
            self._give_up(part, verdict, deadline)
            raise self._failure(verdict, deadline)
        return generation

    def _gather(self, store: Store, part: PrefixStore, generation: str, deadline: Deadline) -> None:
        """Wait for all ranks.

        Raises:
            _InVainError: The generation has failed.
        """
        keys = [rank_key(rank) for rank in range(1, self._world_size)]
        monitor = LivenessMonitor(part, 0, self._world_size)

        def look() -> None:
            self._building.check()
            _bound(store, deadline)
            fault = self._fault(store, part, generation)
            if fault is not None:
                raise _InVainError(fault)
            dead = monitor.dead()
            if dead is not None:
                (rank, words), missing = dead, self._missing(part)
                if missing:  # it may have waited for them, with a limit that ended before this one
                    words += f"; {rank_names(missing)} did not arrive"
                raise _InVainError(Verdict(Outcome.LOST, words, (rank,)))
            if not deadline.passed and self._is_long_since():
                names = rank_names(self._missing(part))
                self._warn(f"{names} of {self._world_size} did not arrive yet")

        if not arrive(part, keys, deadline, look, _LOOK_AGAIN_S):
            others = range(1, self._world_size)
            raise _InVainError(too_late(part, others, self._world_size, deadline.timeout_s))
        for rank, text in enumerate(part.fetch(keys) if keys else [], 1):
            found = JoinRequest.read(text)
            if found is not None and found.asked != self._request.asked:
                raise _InVainError(_sizes(self._request, found, rank))
            if found is not None:
                self._known[rank] = found

    def _fault(self, store: Store, part: PrefixStore, generation: str) -> Verdict | None:
        """Return the fault that another rank or thread has found with the generation that this rank leads."""
        if self._rival is not None:
            return self._rival
        if part.check([GO]):
            return Verdict.read(part.get(GO))
        newest = store.get(_LEADER).decode(errors="replace")
        return None if newest == generation else self._object(part_of(store, newest), 0)

    def _object(self, part: PrefixStore, rank: int) -> Verdict:
        """Tell a generation that its rank is this process's rank as well; return the verdict."""
        verdict = started_twice(rank, request_of(part, rank), self._request.process)
        decide(part, verdict)
        _stay_away(self._endpoint, verdict.words)
        return verdict

    def _missing(self, part: PrefixStore) -> list[int]:
        """Return the ranks that have not registered."""
        return absent(part, rank_key, range(1, self._world_size))

    def _give_up(self, part: PrefixStore, verdict: Verdict, deadline: Deadline) -> None:
        """Let the waiting ranks read the reason of the failure: the store may end with this process."""
        acknowledge(part, 0)
        deaf = {0, *verdict.ranks, *self._missing(part)}
        told = [ack_key(rank) for rank in range(self._world_size) if rank not in deaf]
        if told:
            arrive(part, told, Deadline.after(_TELL_LATE_S if deadline.passed else _TELL_S))

    def _follow_the_current(self, store: Store, deadline: Deadline) -> tuple[Store, str]:
        """Follow rank 0, also where this rank had joined an earlier server at the same address.

        A program that used torch.distributed at this address before may not have closed its server yet.
        """
        try:
            return store, self._follow(store, deadline)
        except _ClosedEarlyError as error:
            try:
                store = self._open(deadline.soon(_NEXT_SERVER_S))
            except StoreError:
                raise error from error.__cause__
        return store, self._follow(store, deadline)

    def _follow(self, store: Store, deadline: Deadline) -> str:
        obstacle = unannounced = _obstacle("rank 0 did not arrive", 0)
        closed: type[RendezvousError] = _ClosedEarlyError
        while True:
            try:
                generation = self._announced(store, deadline, obstacle)
                closed = RendezvousError
                obstacle = _obstacle(_ANNOUNCED) if obstacle == unannounced else obstacle
                found = self._register(part_of(store, generation), generation, deadline)
            except StoreConnectionError as error:
                words = f"{obstacle.words}; then: {error}"
                if deadline.passed or obstacle.words.startswith(_GAVE_UP):
                    raise self._failure(attrs.evolve(obstacle, words=words), deadline) from error
                raise closed(f"{self._endpoint}: {words}") from error
            if found is None:
                return generation
            if found != obstacle:
                log.info("%s: rank %s waits: %s", self._endpoint, self._rank, found.words)
                obstacle = found
            if self._is_long_since():
                self._warn(obstacle.words)

    def _register(self, part: PrefixStore, generation: str, deadline: Deadline) -> Verdict | None:
        """Register in a generation, and wait a moment for go; return the obstacle, or None for success.

        Raises:
            RendezvousError: Go will not be set.
        """
        self._building.check()
        self._building.part = part
        _bound(part, deadline)
        if self._rival is not None:
            decide(part, self._rival)
            raise self._failure(self._rival, deadline)
        mine, was_decided = self._request.to_text(), part.check([GO])
        leader = request_of(part, 0)
        if leader is not None and leader.process.is_another_here:
            self._leader = leader
        if leader is not None and self._endpoint.ends_with_rank_0:
            part.note_server(f"rank 0 ({leader.process.place})")
        holder = part.compare_set(rank_key(self._rank), "", mine)
        if holder != mine.encode():
            return self._taken(part, JoinRequest.read(holder), leader, deadline)
        if not was_decided:
            self._in_time_for = generation
        if leader is not None and leader.asked != self._request.asked:
            # Rank 0 may not read the request of a rank as high as this one.
            decide(part, _sizes(leader, self._request, self._rank))
        if not arrive(part, [GO], deadline.soon(_LOOK_AGAIN_S)):
            # A leader never seen alive may be of an earlier run, and this run's rank 0 may still arrive.
            if leader is not None and leader == self._leader and leader.process.has_ended:
                decide(part, Verdict(Outcome.LOST, f"rank 0 ({leader.process.place}) died", (0,)))
            place = "" if leader is None else f" ({leader.process.place})"
            return _obstacle(f"rank 0{place} waits for other ranks, is stopped, or is gone")
        verdict = Verdict.read(part.fetch([GO])[0])
        if verdict.outcome is Outcome.PROCEED:
            if leader is None or leader.asked == self._request.asked:
                return None
            verdict = _sizes(leader, self._request, self._rank)
        return self._failed(part, generation, verdict, leader, deadline)

    def _failed(
        self,
        part: PrefixStore,
        generation: str,
        verdict: Verdict,
        leader: JoinRequest | None,
        deadline: Deadline,
    ) -> Verdict:
        """Return the obstacle, where a generation has failed.

        Raises:
            RendezvousError: It is of this run.
        """
        gave_up = verdict.outcome is Outcome.TIMEOUT
        is_final = self._is_of_this_run(leader) or (
            self._in_time_for == generation and part.check([ack_key(0)])
        )
        if is_final or gave_up:
            with suppress(StoreConnectionError):  # rank 0 has waited for this no longer
                acknowledge(part, self._rank)  # the store may end at once
        if is_final and verdict.outcome not in (Outcome.TIMEOUT, Outcome.UNREADABLE):
            raise self._failure(verdict, deadline)
        deadline.pause(_LOOK_AGAIN_S)
        words = f"{_GAVE_UP}{verdict.words}" if gave_up else verdict.words
        return _obstacle(words, *verdict.ranks)

    def _taken(
        self,
        part: PrefixStore,
        holder: JoinRequest | None,
        leader: JoinRequest | None,
        deadline: Deadline,
    ) -> Verdict:
        """Return the reason why this rank's place is taken; report it, if the generation is of this run.

        Raises:
            RendezvousError: Another process has this rank.
        """
        if holder is not None and holder.process == self._request.process:  # it gave up, and registered again
            deadline.pause(_LOOK_AGAIN_S)
            words = f"rank {self._rank} has registered before"
            if leader is not None and leader.asked != self._request.asked:
                words += f", as one of {leader.world_size}"
            return _obstacle(words)
        verdict = started_twice(self._rank, holder, self._request.process)
        answered = decide(part, verdict) == verdict and part.check([ack_key(0)])
        lives = holder is not None and holder.process.is_another_here
        if lives or answered or self._is_of_this_run(leader):
            _stay_away(self._endpoint, verdict.words)
            raise self._failure(verdict, deadline)
        deadline.pause(_LOOK_AGAIN_S)
        return _obstacle(verdict.words)

    def _is_of_this_run(self, leader: JoinRequest | None) -> bool:
        """Whether the leader of a generation is known to run, or to have run since this rank registered."""
        if self._endpoint.ends_with_rank_0 or leader is None:
            return self._endpoint.ends_with_rank_0
        return leader == self._leader or leader.process.is_another_here

    def _is_long_since(self) -> bool:
        return time.monotonic() - self._began_s >= self._warn_s

    def _warn(self, why: str) -> None:
        """Log the reason of a long wait, so that a user sees which rank the program waits for.

        Only the first ranks warn: a thousand ranks that wait for one say the same.
        """
        waited_s = time.monotonic() - self._began_s
        self._warn_s = 2 * waited_s
        level = logging.WARNING if self._rank <= 1 else logging.INFO
        log.log(level, "%s: rank %s has waited for %.0f s: %s", self._endpoint, self._rank, waited_s, why)

    def _announced(self, store: Store, deadline: Deadline, obstacle: Verdict) -> str:
        def look() -> None:
            self._building.check()
            _bound(store, deadline)
            if self._rival is not None:
                raise self._failure(self._rival, deadline)

        look()
        if not deadline.passed and arrive(store, [_LEADER], deadline, look, _LOOK_AGAIN_S):
            return store.fetch([_LEADER])[0].decode(errors="replace")
        words = f"rank {self._rank} of {self._world_size} waited {deadline.timeout_s:g} s: {obstacle.words}"
        raise self._failure(attrs.evolve(obstacle, words=words), deadline)

    def _failure(self, verdict: Verdict, deadline: Deadline) -> Dist2Error:
        return error_of(verdict, deadline.timeout_s, self._endpoint)


def _uid_of(endpoint: Endpoint, world_size: int) -> str:
    """Return a name for the ranks that meet at an endpoint, which all of them know before they have met."""
    restart = environment_value("TORCHELASTIC_RESTART_COUNT") or ""
    return hashlib.blake2b(f"{endpoint} {world_size} {restart}".encode(), digest_size=6).hexdigest()


def session_of(endpoint: Endpoint, rank: int, world_size: int) -> RendezvousSession:
    """Return this process's session for a rank at an endpoint."""
    with _lock:
        return _sessions.setdefault(
            (endpoint, rank, world_size), RendezvousSession(endpoint, rank, world_size)
        )


def met_at(endpoint: Endpoint) -> dict[tuple[int, int], bool]:
    """Return the rank and world size of each session here that has met, and whether its store is open."""
    return {
        ranks: session._opened is not None and session._opened() is not None
        for ranks, session in _met(endpoint).items()
    }


def _met(endpoint: Endpoint) -> dict[tuple[int, int], RendezvousSession]:
    """Return the sessions of this process at an endpoint that have met, by rank and world size."""
    with _lock:
        return {
            (rank, world_size): session
            for (place, rank, world_size), session in _sessions.items()
            if place == endpoint and session._generation is not None
        }


def tell_from_thread(endpoint: Endpoint, words: str) -> None:
    """Tell the ranks at an endpoint why this process cannot join them, if they register within two seconds.

    The caller raises an error and does not wait for that. The thread is no daemon: otherwise the process
    could end with the error before the others know.
    """
    _stay_away(endpoint, words)
    threading.Thread(target=_tell, args=(endpoint, words), name="dist2-tell").start()


def _stay_away(endpoint: Endpoint, words: str) -> None:
    """Tell the ranks that this process has met at an endpoint, as another rank, why it comes no more."""
    met = list(_met(endpoint).values())
    if len(met) == 1:  # else ranks are threads, and nothing tells which of them this is
        with suppress(StoreError, WireError):
            met[0].stay_away(words)


def _tell(endpoint: Endpoint, words: str) -> None:
    deadline = Deadline.after(_TELL_S)
    with suppress(StoreError, WireError), closing(_joined(endpoint, deadline)) as store:
        while not deadline.passed and arrive(store, [_LEADER], deadline):
            part = _current(store)
            decide(part, cannot_come(words))
            if arrive(part, [ack_key(0)], deadline.soon(_LOOK_AGAIN_S)):
                return


def _bound(store: Store, deadline: Deadline) -> None:
    """Have a store that does not answer, as its server is stopped, take little longer than is left."""
    store.set_timeout(limit_of(deadline.stretched()))


def _current(store: Store) -> PrefixStore:
    """Return the part of the generation that was announced last."""
    return part_of(store, store.get(_LEADER).decode(errors="replace"))


def _obstacle(words: str, *missing: int) -> Verdict:
    """Return the reason why a rank still waits, which is the verdict when its own deadline passes."""
    return Verdict(Outcome.TIMEOUT, words, missing)


def _sizes(leader: JoinRequest, other: JoinRequest, rank: int) -> Verdict:
    """Return the verdict on two requests with different world sizes."""
    return Verdict(
        Outcome.MISMATCH,
        f"rank 0 has a world size of {leader.world_size} ({leader.process.place}), "
        f"rank {rank} of {other.world_size} ({other.process.place})",
    )


_lock = threading.Lock()
_sessions: dict[tuple[Endpoint, int, int], RendezvousSession] = {}


def _joined(endpoint: Endpoint, deadline: Deadline) -> Store:
    """Return the store at an endpoint, without taking part in the rendezvous."""
    return endpoint.open(1, 1, limit_of(deadline))


def _is_taken(error: StoreConnectionError) -> bool:
    """Whether a server could not listen because another one does."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE


def _is_absent(error: StoreConnectionError) -> bool:
    """Whether no server listens, or its host has no address yet."""
    cause = error.__cause__
    refused = isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED
    return refused or isinstance(cause, socket.gaierror)
