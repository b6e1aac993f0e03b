"""How ranks come together in a store, any number of times, whatever earlier runs left in it.

A store may outlive those who use it: torchrun's agent keeps its own over restarts of all ranks, and a file
stays after a crash. So rank 0 starts a *generation* with a name that nobody used before, and announces it;
the others sign in to the one that is announced, until rank 0 has all of them and says go. They cannot be
taken in by an earlier generation: there the place of their rank is taken.

Within a generation, ranks count how often they came, and the n-th comers share a part of the store. What
is remembered for that lives as long as the process; the connection only as long as somebody uses it.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from dist2.errors import RendezvousError, StoreConnectionError, StoreError, StoreTimeoutError
from dist2.logs import Logger
from dist2.store.base import Store
from dist2.store.deadline import Deadline
from dist2.store.holding import held
from dist2.store.prefix import PrefixStore

log = Logger("dist2.rendezvous")

_LEADER = "dist2/leader"
_LOOK_AGAIN_S = 0.2
"""How long a rank waits for go before it looks whether there is a new generation."""


class Place(Protocol):
    """Where ranks meet. Equal places are the same one."""

    def __hash__(self) -> int: ...

    def __str__(self) -> str:
        """Name it, for messages."""

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the store there; rank 0 may have to make it."""


class Member:
    """One rank at one place, in this process."""

    def __init__(self, place: Place, rank: int, world_size: int) -> None:
        self._place = place
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.RLock()
        self._generation: str | None = None
        self._rounds = 0
        self._opened: ReferenceType[Store] | None = None
        # Stores that were given out keep the one that they are clones of.
        self._kept: WeakKeyDictionary[Store, Store] = WeakKeyDictionary()

    def come(self, timeout: timedelta) -> Store:
        """Meet the other ranks once more; return a store that only the n-th comers share.

        Raises:
            RendezvousError: Ranks are missing, or one came twice.
            StoreError: The store cannot be reached, made or used.
        """
        began_s, deadline = time.monotonic(), Deadline.after(timeout)
        with held(self._lock, deadline.remaining_s()) as mine:
            if not mine:
                raise RendezvousError(
                    f"{self._place}: another thread of rank {self._rank} is still meeting there"
                )
            store = self._open(deadline)
            if self._generation is None:
                store.set_timeout(timeout)
                self._generation = (
                    self._lead(store, deadline, began_s)
                    if self._rank == 0
                    else self._follow(store, deadline, began_s)
                )
                self._rounds = 0
            self._rounds += 1
            clone = store.clone()
            self._kept[clone] = store
            keys = f"dist2/{self._generation}/{self._rounds}"
        clone.set_timeout(timeout)
        return PrefixStore(keys, clone)

    def _open(self, deadline: Deadline) -> Store:
        """Return the store that is open, or open it; forget a generation that it does not know."""
        store = self._opened() if self._opened is not None else None
        if store is not None:
            try:
                store.num_keys()
            except StoreError as error:  # its server went away; rank 0 may have made another
                log.info("rendezvous_reconnects", place=str(self._place), rank=self._rank, reason=str(error))
                store = None
        if store is None:
            store = self._place.open(self._rank, self._world_size, _left(deadline))
            self._opened = ref(store)
            if self._generation is not None and not store.check([_go(self._generation)]):
                self._generation = None
        return store

    def _lead(self, store: Store, deadline: Deadline, began_s: float) -> str:
        generation = secrets.token_hex(8)
        store.set(_LEADER, generation)
        try:
            store.wait([_seat(generation, rank) for rank in range(1, self._world_size)], _left(deadline))
        except StoreTimeoutError as error:
            missing = self._missing(store, generation)
            words = (
                f"{len(missing)} of {self._world_size} ranks did not come within {deadline.timeout_s:g} s, "
                f"missing ranks: {', '.join(map(str, missing))}{store.refused(time.monotonic() - began_s)}"
            )
            self._give_up(store, generation, words, missing, deadline)
            raise RendezvousError(f"{self._place}: {words}") from error
        store.set(_go(generation), str(self._world_size))
        return generation

    def _missing(self, store: Store, generation: str) -> list[int]:
        """Return who has not signed in."""
        return [rank for rank in range(1, self._world_size) if not store.check([_seat(generation, rank)])]

    def _give_up(
        self, store: Store, generation: str, words: str, missing: list[int], deadline: Deadline
    ) -> None:
        """Tell those who have signed in why they wait in vain: the store may end with this process."""
        store.set(_go(generation), words)
        told = [_told(generation, rank) for rank in range(1, self._world_size) if rank not in missing]
        if told:
            _come(store, told, deadline.stretched())

    def _follow(self, store: Store, deadline: Deadline, began_s: float) -> str:
        me = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        obstacle = "rank 0 did not come"
        while True:
            generation = self._announced(store, deadline, began_s, obstacle)
            try:
                found = self._obstacle(store, generation, me, deadline)
            except StoreConnectionError as error:
                raise RendezvousError(f"{self._place}: {obstacle}; then: {error}") from error
            if found is None:
                return generation
            if found != obstacle:
                log.info("rendezvous_waits", place=str(self._place), rank=self._rank, reason=found)
                obstacle = found

    def _obstacle(self, store: Store, generation: str, me: str, deadline: Deadline) -> str | None:
        """Sign in, and wait a moment for go; return why it does not come, None when it has."""
        holder = store.compare_set(_seat(generation, self._rank), "", me).decode()
        if holder != me:
            taken = f"rank {self._rank} has already joined as process {holder}"
            if _is_another_here(holder):
                raise RendezvousError(f"{self._place}: {taken}: is one rank started twice?")
            _pause(deadline)
            return taken
        if not _come(store, [_go(generation)], deadline.soon(_LOOK_AGAIN_S)):
            return "rank 0 waits for other ranks, or is gone"
        words = store.get(_go(generation)).decode()
        if words == str(self._world_size):
            return None
        store.set(_told(generation, self._rank), "yes")
        _pause(deadline)
        if words.isdecimal():
            return f"rank 0 has a world size of {words}, this rank of {self._world_size}"
        return f"rank 0 gave up: {words}"

    def _announced(self, store: Store, deadline: Deadline, began_s: float, obstacle: str) -> str:
        if not deadline.passed and _come(store, [_LEADER], deadline):
            return store.get(_LEADER).decode()
        raise RendezvousError(
            f"{self._place}: rank {self._rank} of {self._world_size} waited "
            f"{deadline.timeout_s:g} s: {obstacle}{store.refused(time.monotonic() - began_s)}"
        )


def _seat(generation: str, rank: int) -> str:
    """Return the key of a rank's place in a generation."""
    return f"dist2/{generation}/rank/{rank}"


def _told(generation: str, rank: int) -> str:
    """Return the key that a rank sets when it knows that a generation has come to nothing."""
    return f"dist2/{generation}/told/{rank}"


def _go(generation: str) -> str:
    """Return the key for how many ranks a generation has, or why it has come to nothing."""
    return f"dist2/{generation}/go"


def member(place: Place, rank: int, world_size: int) -> Member:
    """Return what this process remembers of a rank at a place."""
    with _lock:
        return _members.setdefault((place, rank, world_size), Member(place, rank, world_size))


_lock = threading.Lock()
_members: dict[tuple[Place, int, int], Member] = {}


def _come(store: Store, keys: list[str], deadline: Deadline) -> bool:
    try:
        store.wait(keys, _left(deadline))
    except StoreTimeoutError:
        return False
    return True


def _pause(deadline: Deadline) -> None:
    threading.Event().wait(deadline.remaining_s(at_most=_LOOK_AGAIN_S))


def _left(deadline: Deadline) -> timedelta:
    left_s = deadline.remaining_s()
    return timedelta(0) if left_s is None else timedelta(seconds=max(left_s, 0.001))


def _is_another_here(holder: str) -> bool:
    """Whether a name that a rank signed in with is that of another living process of this host."""
    host, pid, _ = holder.rsplit("/", 2)
    if host != socket.gethostname() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
