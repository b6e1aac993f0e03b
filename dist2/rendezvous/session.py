"""How ranks come together in a store, any number of times, whatever earlier runs left in it.

A store may outlive those who use it: torchrun's agent keeps its own over restarts of all ranks, and a file
stays after a crash. So rank 0 starts a *generation* with a name that nobody used before, and announces it;
the others sign in to the one that is announced, until rank 0 has all of them and says go. They cannot be
taken in by an earlier generation: there the place of their rank is taken.

Whoever finds something wrong with a generation (its rank taken by another process, another world size) says
so there, in place of go. Rank 0, if it is not long gone, reads that and lets all know that it has.

Within a generation, ranks count how often they came, and the n-th comers share a part of the store. What
is remembered for that lives as long as the process; the connection only as long as somebody uses it.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from weakref import ReferenceType, WeakKeyDictionary, ref

from dist2.errors import RendezvousError, StoreConnectionError, StoreError, StoreTimeoutError, WireError
from dist2.rendezvous.endpoints import Endpoint
from dist2.rendezvous.liveness import LivenessMonitor, Process, died
from dist2.rendezvous.registration import (
    RankRegistration,
    ack_key,
    go_key,
    process_in,
    rank_key,
    registration_of,
    sizes,
)
from dist2.rendezvous.waiting import absent
from dist2.runtime.deadline import Deadline
from dist2.store.base import Store
from dist2.store.holding import held
from dist2.store.prefix import PrefixStore

log = logging.getLogger("dist2.rendezvous")

_LEADER = "dist2/leader"
_LOOK_AGAIN_S = 0.2
"""How long a rank waits for go before it looks whether there is a new generation."""
_NEXT_SERVER_S = 1.0
"""How long a rank looks for another server after one closed before rank 0 had announced itself there."""
_WARN_S = 10.0
"""How long a rank waits before it says for whom; the next time after twice as long."""
_TELL_S = 2.0
"""How long a rank that gives up waits for others to hear of it."""
_TELL_LATE_S = 0.5
"""The same after its limit: those that are not held up have heard within a millisecond."""
_WRONG = "!"
"""How the words begin that stand in place of go where nothing can come of a generation."""
_WORDS = 1000
"""How long what stands in a store may be, to be shown."""


class _ClosedEarlyError(RendezvousError):
    """The server closed before rank 0 had announced itself there."""


class RendezvousSession:
    """The rendezvous of one rank at one endpoint, in this process."""

    def __init__(self, endpoint: Endpoint, rank: int, world_size: int) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.RLock()
        self._generation: str | None = None
        self._rounds = 0
        self._registration = RankRegistration(Process.here(), world_size)
        self._in_time_for: str | None = None
        self._leader: RankRegistration | None = None
        self._warn_s = _WARN_S
        self._opened: ReferenceType[Store] | None = None
        # Stores that were given out keep the one that they are clones of.
        self._kept: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()

    def come(self, timeout: timedelta) -> tuple[Store, LivenessMonitor]:
        """Meet the other ranks once more; return a store that only the n-th comers share, and who they are.

        Raises:
            RendezvousError: Ranks are missing, one came twice, or they do not agree how many they are.
            StoreError: The store cannot be reached, made or used.
        """
        began_s, deadline = time.monotonic(), Deadline.after(timeout)
        with held(self._lock, deadline.remaining_s()) as mine:
            if not mine:
                raise RendezvousError(
                    f"{self._endpoint}: another thread of rank {self._rank} is still meeting there"
                )
            store = self._open(deadline)
            if self._generation is None:
                store.set_timeout(timeout)
                self._registration = RankRegistration(Process.here(), self._world_size)
                self._warn_s = _WARN_S
                if self._rank == 0:
                    self._generation = self._lead(store, deadline, began_s)
                else:
                    store, self._generation = self._follow_the_current(store, deadline, began_s)
                self._rounds = 0
            self._rounds += 1
            clone = store.clone()
            self._kept[clone] = store
            keys = f"dist2/{self._generation}/{self._rounds}"
            monitor = self._monitor(clone, self._generation)
        clone.set_timeout(timeout)
        return PrefixStore(keys, clone), monitor

    def _monitor(self, store: Store, generation: str) -> LivenessMonitor:
        """Return who has signed in."""
        return LivenessMonitor(store, self._rank, self._world_size, partial(rank_key, generation), process_in)

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
                store = self._endpoint.open(self._rank, self._world_size, _left(deadline))
            except StoreConnectionError as error:
                if self._rank == 0 and _is_taken(error):
                    self._object_to_host(error)
                raise
            self._opened = ref(store)
            if self._generation is not None and not store.check([go_key(self._generation)]):
                self._generation = None
        return store

    def _object_to_host(self, error: StoreConnectionError) -> None:
        """Tell another rank 0, if it is who has the address that this rank 0 finds taken."""
        deadline = Deadline.after(_TELL_S)
        with suppress(StoreError, WireError), closing(_joined(self._endpoint, deadline)) as store:
            if _come(store, [_LEADER], deadline):
                words = self._object(store, store.get(_LEADER).decode(errors="replace"), 0)
                raise RendezvousError(f"{self._endpoint}: {words}; or do two jobs meet there?") from error

    def _lead(self, store: Store, deadline: Deadline, began_s: float) -> str:
        if store.check([_LEADER]):
            before = store.get(_LEADER).decode(errors="replace")
            found = registration_of(store, before, 0)
            if found is not None and found.process.is_another_here:
                raise RendezvousError(f"{self._endpoint}: {self._object(store, before, 0)}")
        generation = secrets.token_hex(8)
        store.set(rank_key(generation, 0), self._registration.to_text())
        store.set(_LEADER, generation)
        words, missing = self._gather(store, generation, deadline, began_s)
        if not words:
            go = str(self._world_size)
            said = store.compare_set(go_key(generation), "", go).decode(errors="replace")
            words = "" if said == go else said[:_WORDS]
        if words:
            self._give_up(store, generation, words, missing, deadline)
            raise RendezvousError(f"{self._endpoint}: {words.removeprefix(_WRONG)}")
        return generation

    def _gather(
        self, store: Store, generation: str, deadline: Deadline, began_s: float
    ) -> tuple[str, list[int]]:
        """Wait for all ranks; return why nothing can come of it, and who is missing."""
        keys = [rank_key(generation, rank) for rank in range(1, self._world_size)]
        monitor = self._monitor(store, generation)
        while not _come(store, keys, deadline.soon(_LOOK_AGAIN_S)):
            words = self._wrong(store, generation)
            if words:
                return words, self._missing(store, generation)
            dead = monitor.dead()
            if dead is not None:
                (rank, words), missing = dead, self._missing(store, generation)
                if missing:  # it may have waited for them, to a limit that ended before this one
                    words += f"; {_names(missing)}"
                return _WRONG + words, [rank, *missing]
            if deadline.passed:
                missing = self._missing(store, generation)
                return (
                    f"{len(missing)} of {self._world_size} ranks did not come within "
                    f"{deadline.timeout_s:g} s, {_names(missing)}"
                ), missing
            if self._is_long_since(began_s):
                missing = self._missing(store, generation)
                self._warn(f"{len(missing)} of {self._world_size} have not come: {missing}", began_s)
        return self._sizes_that_differ(store, generation), []

    def _wrong(self, store: Store, generation: str) -> str:
        """Return what others have found wrong with the generation that this rank leads."""
        if store.check([go_key(generation)]):
            return store.get(go_key(generation)).decode(errors="replace")[:_WORDS]
        newest = store.get(_LEADER).decode(errors="replace")
        return "" if newest == generation else _WRONG + self._object(store, newest, 0)

    def _sizes_that_differ(self, store: Store, generation: str) -> str:
        keys = [rank_key(generation, rank) for rank in range(1, self._world_size)]
        for rank, text in enumerate(store.multi_get(keys), 1):
            found = RankRegistration.read(text.decode(errors="replace"))
            if found is not None and found.world_size != self._world_size:
                return _WRONG + sizes(self._registration, found, rank)
        return ""

    def _object(self, store: Store, generation: str, rank: int) -> str:
        """Tell a generation that a rank has come there which this process is; return what was said."""
        found = registration_of(store, generation, rank)
        other = "a process that did not say which" if found is None else str(found.process)
        words = f"rank {rank} was started twice: as {other} and as {self._registration.process}"
        _say(store, generation, words)
        return words

    def _missing(self, store: Store, generation: str) -> list[int]:
        """Return who has not signed in."""
        return absent(store, partial(rank_key, generation), range(1, self._world_size))

    def _give_up(
        self, store: Store, generation: str, words: str, missing: list[int], deadline: Deadline
    ) -> None:
        """Tell those who have signed in why they wait in vain: the store may end with this process."""
        store.set(go_key(generation), words)
        store.set(ack_key(generation, 0), "yes")
        told = [ack_key(generation, rank) for rank in range(1, self._world_size) if rank not in missing]
        if told:
            _come(store, told, Deadline.after(_TELL_LATE_S if deadline.passed else _TELL_S))

    def _follow_the_current(self, store: Store, deadline: Deadline, began_s: float) -> tuple[Store, str]:
        """Follow rank 0, also where this rank had joined an earlier server at the same address.

        A program that used torch.distributed at this address before may not have closed its server yet.
        """
        try:
            return store, self._follow(store, deadline, began_s)
        except _ClosedEarlyError as error:
            try:
                left_s = deadline.remaining_s()
                wait_s = _NEXT_SERVER_S if left_s is None else max(0.001, min(_NEXT_SERVER_S, left_s))
                store = self._open(Deadline.after(timedelta(seconds=wait_s)))
            except StoreError:
                raise error from error.__cause__
        return store, self._follow(store, deadline, began_s)

    def _follow(self, store: Store, deadline: Deadline, began_s: float) -> str:
        obstacle = "rank 0 did not come"
        closed: type[RendezvousError] = _ClosedEarlyError
        while True:
            try:
                generation = self._announced(store, deadline, obstacle)
                closed = RendezvousError
                found = self._obstacle(store, generation, deadline)
            except StoreConnectionError as error:
                raise closed(f"{self._endpoint}: {obstacle}; then: {error}") from error
            if found is None:
                return generation
            if found != obstacle:
                log.info("%s: rank %s waits: %s", self._endpoint, self._rank, found)
                obstacle = found
            if self._is_long_since(began_s):
                self._warn(obstacle, began_s)

    def _obstacle(self, store: Store, generation: str, deadline: Deadline) -> str | None:
        """Sign in, and wait a moment for go; return why it does not come, None when it has.

        Raises:
            RendezvousError: It will not come.
        """
        mine, was_decided = self._registration.to_text(), store.check([go_key(generation)])
        leader = registration_of(store, generation, 0)
        if leader is not None and leader.process.is_another_here:
            self._leader = leader
        holder = store.compare_set(rank_key(generation, self._rank), "", mine).decode(errors="replace")
        if holder != mine:
            return self._taken(store, generation, RankRegistration.read(holder), leader, deadline)
        if not was_decided:
            self._in_time_for = generation
        if leader is not None:
            if self._endpoint.ends_with_rank_0:
                store.note_server(f"rank 0 ({leader.process})")
            if leader.world_size != self._world_size:
                # Rank 0 may not read the registration of a rank as high as this one.
                _say(store, generation, sizes(leader, self._registration, self._rank))
        if not _come(store, [go_key(generation)], deadline.soon(_LOOK_AGAIN_S)):
            # One that was never seen alive may be of an earlier run, and rank 0 of this one has yet to come.
            if leader is not None and leader == self._leader and leader.process.has_ended:
                _say(store, generation, died(0, leader.process))
            return "rank 0 waits for other ranks, or is gone"
        words = store.get(go_key(generation)).decode(errors="replace")
        if words == str(self._world_size):
            return None
        if words.isdecimal():
            obstacle = f"rank 0 has a world size of {words}, this rank of {self._world_size}"
            if leader is not None and self._is_of_this_run(leader):
                raise RendezvousError(f"{self._endpoint}: {sizes(leader, self._registration, self._rank)}")
        else:
            obstacle, is_wrong = words.removeprefix(_WRONG)[:_WORDS], words.startswith(_WRONG)
            is_final = self._is_of_this_run(leader) or (
                self._in_time_for == generation and store.check([ack_key(generation, 0)])
            )
            if is_final or not is_wrong:
                with suppress(StoreConnectionError):  # rank 0 has waited for this no longer
                    store.set(ack_key(generation, self._rank), "yes")  # the store may end at once
            if is_final and is_wrong:
                raise RendezvousError(f"{self._endpoint}: {obstacle}")
            obstacle = f"rank 0 gave up: {obstacle}"
        deadline.pause(_LOOK_AGAIN_S)
        return obstacle

    def _taken(
        self,
        store: Store,
        generation: str,
        holder: RankRegistration | None,
        leader: RankRegistration | None,
        deadline: Deadline,
    ) -> str:
        """Say why there is no place in a generation for this rank; tell it, if it is of this run.

        Raises:
            RendezvousError: Another process is this rank.
        """
        if holder is not None and holder.process == self._registration.process:  # it gave up, and came again
            deadline.pause(_LOOK_AGAIN_S)
            return f"rank {self._rank} has come before"
        words = self._object(store, generation, self._rank)
        said = store.get(go_key(generation)).decode(errors="replace") == _WRONG + words
        answered = said and store.check([ack_key(generation, 0)])
        lives = holder is not None and holder.process.is_another_here
        if lives or answered or self._is_of_this_run(leader):
            raise RendezvousError(f"{self._endpoint}: {words}")
        deadline.pause(_LOOK_AGAIN_S)
        return words

    def _is_of_this_run(self, leader: RankRegistration | None) -> bool:
        """Whether who leads a generation is known to be there still, or to have been since this rank came."""
        if self._endpoint.ends_with_rank_0 or leader is None:
            return self._endpoint.ends_with_rank_0
        return leader == self._leader or leader.process.is_another_here

    def _is_long_since(self, began_s: float) -> bool:
        return time.monotonic() - began_s >= self._warn_s

    def _warn(self, why: str, began_s: float) -> None:
        """Say why it takes so long: else a program stands still for minutes, and nobody knows for whom."""
        waited_s = time.monotonic() - began_s
        self._warn_s = 2 * waited_s
        log.warning("%s: rank %s has waited for %.0f s: %s", self._endpoint, self._rank, waited_s, why)

    def _announced(self, store: Store, deadline: Deadline, obstacle: str) -> str:
        if not deadline.passed and _come(store, [_LEADER], deadline):
            return store.get(_LEADER).decode(errors="replace")
        raise RendezvousError(
            f"{self._endpoint}: rank {self._rank} of {self._world_size} waited "
            f"{deadline.timeout_s:g} s: {obstacle}"
        )


def session_of(endpoint: Endpoint, rank: int, world_size: int) -> RendezvousSession:
    """Return this process's session for a rank at an endpoint."""
    with _lock:
        return _sessions.setdefault(
            (endpoint, rank, world_size), RendezvousSession(endpoint, rank, world_size)
        )


def tell_from_thread(endpoint: Endpoint, words: str) -> None:
    """Tell the ranks at an endpoint why this process cannot join them, if they come within two seconds.

    The caller raises an error and does not wait for that. The thread is no daemon: else the process could end
    of the error before the others know.
    """
    threading.Thread(target=_tell, args=(endpoint, words), name="dist2-tell").start()


def _tell(endpoint: Endpoint, words: str) -> None:
    deadline = Deadline.after(_TELL_S)
    with suppress(StoreError, WireError), closing(_joined(endpoint, deadline)) as store:
        while not deadline.passed and _come(store, [_LEADER], deadline):
            generation = store.get(_LEADER).decode(errors="replace")
            _say(store, generation, f"{Process.here()} cannot come: {words}")
            if _come(store, [ack_key(generation, 0)], deadline.soon(_LOOK_AGAIN_S)):
                return


def _names(missing: list[int]) -> str:
    return f"missing ranks: {', '.join(map(str, missing))}"


def _say(store: Store, generation: str, what_is_wrong: str) -> None:
    """Let nothing come of a generation, unless it is decided."""
    store.compare_set(go_key(generation), "", _WRONG + what_is_wrong)


_lock = threading.Lock()
_sessions: dict[tuple[Endpoint, int, int], RendezvousSession] = {}


def _joined(endpoint: Endpoint, deadline: Deadline) -> Store:
    """Return the store at an endpoint, without taking part in the rendezvous."""
    return endpoint.open(1, 1, _left(deadline))


def _come(store: Store, keys: list[str], deadline: Deadline) -> bool:
    try:
        store.wait(keys, _left(deadline))
    except StoreTimeoutError:
        return False
    return True


def _left(deadline: Deadline) -> timedelta:
    left_s = deadline.remaining_s()
    return timedelta(0) if left_s is None else timedelta(seconds=max(left_s, 0.001))


def _is_taken(error: StoreConnectionError) -> bool:
    """Whether a server could not listen because somebody else does."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
