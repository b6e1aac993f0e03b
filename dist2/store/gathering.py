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

import structlog

from dist2.errors import RendezvousError, StoreError, StoreTimeoutError
from dist2.security.refusals import refusals
from dist2.store.base import Store
from dist2.store.deadline import Deadline
from dist2.store.prefix import PrefixStore

log = structlog.get_logger("dist2.rendezvous")

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
        self._lock = threading.Lock()
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
        left_s = deadline.remaining_s()
        if not self._lock.acquire(timeout=-1 if left_s is None else left_s):
            raise RendezvousError(
                f"{self._place}: another thread of rank {self._rank} is still meeting there"
            )
        try:
            store = self._open(deadline)
            if self._generation is None:
                store.set_timeout(timeout)
                self._generation = (
                    self._lead(store, deadline, began_s) if self._rank == 0 else self._follow(store, deadline)
                )
                self._rounds = 0
            self._rounds += 1
            clone = store.clone()
            self._kept[clone] = store
        finally:
            self._lock.release()
        clone.set_timeout(timeout)
        return PrefixStore(f"dist2/{self._generation}/{self._rounds}", clone)

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
            if self._generation is not None and not store.check([f"dist2/{self._generation}/go"]):
                self._generation = None
        return store

    def _lead(self, store: Store, deadline: Deadline, began_s: float) -> str:
        generation = secrets.token_hex(8)
        store.set(_LEADER, generation)
        others = range(1, self._world_size)
        places = [f"dist2/{generation}/rank/{rank}" for rank in others]
        try:
            store.wait(places, _left(deadline))
        except StoreTimeoutError as error:
            missing = [
                str(rank) for rank, place in zip(others, places, strict=True) if not store.check([place])
            ]
            raise RendezvousError(
                f"{self._place}: {len(missing)} of {self._world_size} ranks did not come within "
                f"{deadline.timeout_s:g} s, missing ranks: {', '.join(missing)}{refusals.meanwhile(began_s)}"
            ) from error
        store.set(f"dist2/{generation}/go", str(self._world_size))
        return generation

    def _follow(self, store: Store, deadline: Deadline) -> str:
        me = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        obstacle = "rank 0 did not come"
        pause = threading.Event()
        while True:
            generation = self._announced(store, deadline, obstacle)
            holder = store.compare_set(f"dist2/{generation}/rank/{self._rank}", "", me).decode()
            if holder == me:
                obstacle = "rank 0 waits for other ranks, or is gone"
                if _comes(store, f"dist2/{generation}/go", deadline.soon(_LOOK_AGAIN_S)):
                    expected = int(store.get(f"dist2/{generation}/go"))
                    if expected == self._world_size:
                        return generation
                    obstacle = f"rank 0 has a world size of {expected}, this rank of {self._world_size}"
            else:
                obstacle = f"rank {self._rank} has already joined as process {holder}"
                if _is_another_here(holder):
                    raise RendezvousError(f"{self._place}: {obstacle}: is one rank started twice?")
                pause.wait(deadline.remaining_s(at_most=_LOOK_AGAIN_S))
            log.info("rendezvous_waits", place=str(self._place), rank=self._rank, reason=obstacle)

    def _announced(self, store: Store, deadline: Deadline, obstacle: str) -> str:
        if not deadline.passed and _comes(store, _LEADER, deadline):
            return store.get(_LEADER).decode()
        raise RendezvousError(
            f"{self._place}: rank {self._rank} of {self._world_size} waited "
            f"{deadline.timeout_s:g} s: {obstacle}"
        )


def member(place: Place, rank: int, world_size: int) -> Member:
    """Return what this process remembers of a rank at a place."""
    with _lock:
        return _members.setdefault((place, rank, world_size), Member(place, rank, world_size))


_lock = threading.Lock()
_members: dict[tuple[Place, int, int], Member] = {}


def _comes(store: Store, key: str, deadline: Deadline) -> bool:
    try:
        store.wait([key], _left(deadline))
    except StoreTimeoutError:
        return False
    return True


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
