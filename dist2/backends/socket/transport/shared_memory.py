"""`SharedHost`: the memory that a process shares with the other processes of its host.

One arena a process, whose first part is a directory: for each group the process is in, where in the
arena that group's region lies. It is a hash table, so that the thousandth group is found as fast as the
first. A region is written by its process and read by the group's other members of the host, so a group
needs no message to be set up: its members look each other up.

The layout relies on stores becoming visible in the order made (x86-64); elsewhere `available` says no.
"""

from __future__ import annotations

import errno
import os
import platform
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import attrs

from dist2.backends.socket.transport.doorbell import Doorbell, DoorbellLocator, PeerDoorbell
from dist2.errors import Dist2Error, PeerLostError, ResourceError
from dist2.runtime.other_process import has_ended, how_ended
from dist2.runtime.resources import system_call
from dist2.runtime.shared_memory import INSTEAD, PAGE_BYTES, TOKEN_BYTES, Arena, ArenaLocator, Mapping, attach

ARENA_BYTES = 40 << 30
"""Address space, not memory: pages are allocated when touched."""

DIRECTORY_ENTRIES = 16384
_RECLAIM_MISSES = 4
_KEPT_BYTES = 4 << 20
_DIRECTORY_BYTES = 16 * DIRECTORY_ENTRIES
_DEPARTED, _AWAITING = 0, 1  # words of a process behind the token of its arena
_FREE, _LEFT = 0, (1 << 64) - 1  # a free entry; an entry of a closed group, with others possibly behind it
_CLOSED = (1 << 64) - 1  # in place of an offset: the group was closed before all members had found the region
_ABORTED = (1 << 64) - 2  # likewise, and by an abort
_MAX_CLOSED = 1024
"""Entries that are kept of such groups."""


def available() -> bool:
    """Whether this machine can share memory the way this module needs."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


@attrs.frozen
class Region:
    """A group's part of an arena.

    Attributes:
        mapping: The arena, as this process sees it.
        offset: First byte.
        nbytes: Length.
    """

    mapping: Mapping
    offset: int
    nbytes: int

    @property
    def bytes(self) -> memoryview:
        """All of it."""
        return self.mapping.view[self.offset : self.offset + self.nbytes]


def _words_of(arena: Mapping) -> memoryview:
    """Return the state of a process: whether it has left, and its number of sleepers for others' regions."""
    return arena.words(TOKEN_BYTES, 2)


class Directory:
    """The positions of groups' regions in an arena, by context; written by its owner only.

    A hash table with linear probing. Its entries change one word at a time, in an order that lets others read
    it at any moment.
    """

    def __init__(self, arena: Mapping) -> None:
        self._words = arena.words(PAGE_BYTES, 2 * DIRECTORY_ENTRIES)

    def find(self, context: int) -> int | None:
        """Return the offset of a group's region."""
        offset = self._offset_of(context)
        return None if offset in (_CLOSED, _ABORTED) else offset

    def is_closed(self, context: int) -> bool:
        """Whether a group was closed before all its members had found its region."""
        return self._offset_of(context) in (_CLOSED, _ABORTED)

    def is_aborted(self, context: int) -> bool:
        """Whether that was by an abort."""
        return self._offset_of(context) == _ABORTED

    def _offset_of(self, context: int) -> int | None:
        words, entry = self._words, context % DIRECTORY_ENTRIES
        for _ in range(DIRECTORY_ENTRIES):
            found = words[2 * entry]
            if found == context:
                return words[2 * entry + 1]
            if found == _FREE:
                return None
            entry = (entry + 1) % DIRECTORY_ENTRIES
        return None

    def enter(self, context: int, offset: int) -> bool:
        """Add a group; False if the table is full."""
        words, entry = self._words, context % DIRECTORY_ENTRIES
        for _ in range(DIRECTORY_ENTRIES):
            if words[2 * entry] in (_FREE, _LEFT):
                words[2 * entry + 1] = offset
                words[2 * entry] = context  # last: a reader that finds it may use the offset
                return True
            entry = (entry + 1) % DIRECTORY_ENTRIES
        return False

    def close(self, context: int, aborted: bool = False) -> None:
        """Have members that look for the region of a group find that this process has closed the group."""
        entry = self._entry_of(context)
        if entry is not None:
            self._words[2 * entry + 1] = _ABORTED if aborted else _CLOSED

    def remove(self, context: int) -> None:
        """Remove a group, if it is there; entries at the end of a probe sequence are freed."""
        words, entry = self._words, self._entry_of(context)
        if entry is None:
            return
        words[2 * entry] = _LEFT
        if words[2 * ((entry + 1) % DIRECTORY_ENTRIES)] == _FREE:
            while words[2 * entry] == _LEFT:
                words[2 * entry] = _FREE
                entry = (entry - 1) % DIRECTORY_ENTRIES

    def _entry_of(self, context: int) -> int | None:
        words = self._words
        for each in range(context, context + DIRECTORY_ENTRIES):
            entry = each % DIRECTORY_ENTRIES
            if words[2 * entry] == context:
                return entry
            if words[2 * entry] == _FREE:
                break
        return None


class Neighbour:
    """Another process (or, in tests, another fabric) of this host.

    Attributes:
        pid: Its process.
        doorbell: Wakes it.
        find: Returns where in its arena the region of a group lies, by context; None while it is not in it.
        has_closed: Whether it has closed a group before all members had found its region there, by context.
        has_aborted: Whether that was by an abort.
    """

    def __init__(self, pid: int, arena: ArenaLocator, doorbell: DoorbellLocator) -> None:
        self.pid = pid
        try:
            with system_call("pidfd_open", INSTEAD):
                self._pidfd = os.pidfd_open(pid) if pid != os.getpid() else -1
        except ResourceError as error:
            if error.errno == errno.ESRCH:
                raise PeerLostError(f"process {pid} has ended") from error
            raise
        with ExitStack() as failed:
            if self._pidfd >= 0:
                failed.callback(os.close, self._pidfd)
            self._mapping = attach(arena)
            self._words = _words_of(self._mapping)
            directory = Directory(self._mapping)
            self.find, self.has_closed = directory.find, directory.is_closed
            self.has_aborted = directory.is_aborted
            self.doorbell = PeerDoorbell(doorbell)
            failed.callback(self.doorbell.close)
            if self.is_dead():  # its number may have been another's when a file was opened by it
                raise PeerLostError(f"process {pid} has ended")
            failed.pop_all()
        self._give_back = weakref.finalize(self, _close_both, self._pidfd, self.doorbell)
        self._give_back.atexit = False

    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return has_ended(self._pidfd)

    def end(self) -> str:
        """Return how the process ended, in words that follow the name of its rank."""
        return how_ended(self._pidfd)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process is dead; -1 for this very process."""
        return self._pidfd

    def has_departed(self) -> bool:
        """Whether it closed everything in good order: the end of the process is not a death then."""
        return bool(self._words[_DEPARTED])

    def awaits_regions(self) -> bool:
        """Whether a thread there sleeps until other members of a group have joined."""
        return bool(self._words[_AWAITING])

    def region(self, offset: int, nbytes: int) -> Region:
        """Return memory that the process has lent.

        Raises:
            ValueError: It does not lie in the process's arena.
        """
        if not 0 <= offset <= self._mapping.nbytes - nbytes:
            raise ValueError(f"offset {offset} lies outside of the arena")
        return Region(self._mapping, offset, nbytes)

    def close(self) -> None:
        self._give_back()


def _close_both(pidfd: int, doorbell: PeerDoorbell) -> None:
    doorbell.close()
    if pidfd >= 0:
        os.close(pidfd)


class SharedHost:
    """This process's share, and the neighbours it has met.

    Attributes:
        doorbell: Wakes this process's sleepers.
    """

    def __init__(self) -> None:
        with ExitStack() as failed:
            self.doorbell = Doorbell()
            failed.callback(self.doorbell.close)
            self._arena = Arena(ARENA_BYTES)
            failed.pop_all()
        directory = self._arena.allocate(_DIRECTORY_BYTES)
        assert directory == PAGE_BYTES  # the first allocation of an arena; neighbours count on it
        self._words = _words_of(self._arena)
        self._directory = Directory(self._arena)
        self._neighbours: dict[str, Neighbour] = {}
        self._retired: deque[tuple[Region, Callable[[], bool]]] = deque()
        self._closed_early: deque[int] = deque()
        self._lock = threading.Lock()
        self._regions = 0
        self._closing = self._closed = False

    def locators(self) -> dict[str, str]:
        """Return the arguments of `neighbour`, as text to publish."""
        return {"arena": str(self._arena.locator), "doorbell": str(self.doorbell.locator)}

    def neighbour(self, fabric_id: str, pid: int, locators: dict[str, str]) -> Neighbour:
        """Return a process of this host, attaching to it the first time.

        Raises:
            PeerLostError: It is gone.
        """
        known = self._neighbours.get(fabric_id)  # without the lock: all but the first groups with it find it
        if known is not None:
            return known
        with self._lock:
            known = self._neighbours.get(fabric_id)
            if known is None:
                self._forget_the_dead()
                arena = ArenaLocator.parse(locators["arena"])
                known = Neighbour(pid, arena, DoorbellLocator.parse(locators["doorbell"]))
                self._neighbours[fabric_id] = known
            return known

    def _forget_the_dead(self) -> None:
        """Keep nothing of processes that ended, but for the groups that still know them."""
        dead = [fabric_id for fabric_id, each in self._neighbours.items() if each.is_dead()]
        for fabric_id in dead:
            del self._neighbours[fabric_id]

    def join(self, context: int, nbytes: int, zeroed: int) -> Region:
        """Allocate a region for a group, and enter it in the directory.

        Args:
            context: The group's context id.
            nbytes: Its length.
            zeroed: How many of its first bytes must be zero.

        Raises:
            Dist2Error: Too many groups are open.
        """
        with self._lock:
            offset = self._left_over(nbytes, zeroed)
            if offset is None:
                self._reclaim()
                offset = self._arena.allocate(nbytes)
            if offset is None or not self._entered(context, offset):
                raise Dist2Error(
                    "shared memory of this process has no room for another group: at most "
                    f"{DIRECTORY_ENTRIES} groups and {ARENA_BYTES >> 30} GiB of address space; shut some down"
                )
            self._regions += 1
            return Region(self._arena, offset, nbytes)

    def _entered(self, context: int, offset: int) -> bool:
        """Enter a region in the directory, in place of closed groups if need be; False if it is full."""
        while not self._directory.enter(context, offset):
            if not self._closed_early:
                return False
            self._directory.remove(self._closed_early.popleft())
        return True

    @contextmanager
    def awaiting_regions(self) -> Iterator[None]:
        """Have this process's doorbell rung when others join groups, for threads that sleep until then."""
        with self._lock:
            self._words[_AWAITING] += 1
        try:
            yield
        finally:
            with self._lock:
                self._words[_AWAITING] -= 1

    def lend(self, nbytes: int) -> Region | None:
        """Allocate memory that belongs to no group, until the end; None if there is no room."""
        with self._lock:
            offset = self._arena.allocate(nbytes)
            return None if offset is None else Region(self._arena, offset, nbytes)

    def leave(
        self,
        context: int,
        region: Region,
        unused: Callable[[], bool],
        met: bool = True,
        aborted: bool = False,
    ) -> None:
        """Remove a group from the directory; its memory is free once ``unused()`` is true.

        The region left last stays for the next group, unless it is long.

        Args:
            context: The group's context id.
            region: Its region.
            unused: Whether no other process uses the region.
            met: Whether all members have found the region; others are to find that the group was closed.
            aborted: Whether the group was aborted.
        """
        with self._lock:
            if met:
                self._directory.remove(context)
            else:
                self._directory.close(context, aborted)
                self._closed_early.append(context)
                if len(self._closed_early) > _MAX_CLOSED:
                    self._directory.remove(self._closed_early.popleft())
            self._reclaim()
            self._retired.append((region, unused))
            if region.nbytes > _KEPT_BYTES:
                self._reclaim()
            self._regions -= 1
            self._close_if_unused()

    def close(self) -> None:
        """Close descriptors, as soon as no group has a region; memory goes with the last view of it."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._words[_DEPARTED] = 1  # other processes can read it after the end of this one
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Do the work of `close`, but not while a group may sleep on a descriptor, or ring by one."""
        if self._closing and not self._regions:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close descriptors without the lock, which a forked child may inherit held."""
        if self._closed:
            return
        self._closed = True
        for neighbour in self._neighbours.values():
            neighbour.close()
        self._neighbours.clear()
        self._retired.clear()
        self._arena.close()
        self.doorbell.close()

    def _left_over(self, nbytes: int, zeroed: int) -> int | None:
        """Return the region that was released first, if it has so many bytes and no process uses it any more.

        Its pages are still allocated: returning them to the kernel and getting others costs more than all
        other memory work of making a group.
        """
        if not self._retired:
            return None
        region, unused = self._retired[0]
        if region.nbytes != nbytes or not unused():
            return None
        self._retired.popleft()
        region.mapping.view[region.offset : region.offset + zeroed] = bytes(zeroed)
        return region.offset

    def _reclaim(self) -> None:
        """Free regions that the other members have left as well, the oldest first; keep a few others."""
        still_used = 0
        for _ in range(len(self._retired)):
            region, unused = self._retired.popleft()
            if unused():
                self._arena.release(region.offset, region.nbytes)
                continue
            self._retired.append((region, unused))
            still_used += 1
            if still_used == _RECLAIM_MISSES:
                break
