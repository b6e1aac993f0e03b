"""`Presence`: the other processes that this one has seen alive. The fabric's lock guards it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress

from dist2.runtime.other_process import how_ended

LOST_S = 0.3
"""Time after a link's end in which evidence of the peer's end is awaited."""
GRACE_S = 0.05
"""Time after a link's end in which data of another link is still accepted."""


class Presence:
    """Other processes, by fabric id, and their ends.

    Args:
        epoll: Watches the descriptors that report the end of a process.

    Attributes:
        dead: Processes that groups consider gone, and the end of each as text.
        unseen: Those among them of whose end there is no evidence: the connection to them was lost.
        ends: The ends of processes of this host as text.
        parted: Processes that have exited cleanly, or announced it.
        suspects: Processes that soon count as dead, and when (in seconds).
    """

    def __init__(self, epoll: select.epoll) -> None:
        self.dead: dict[str, str] = {}
        self.unseen: set[str] = set()
        self.ends: dict[str, str] = {}
        self.parted: set[str] = set()
        self.suspects: dict[str, float] = {}
        self._epoll = epoll
        self._watched: dict[int, str] = {}
        self._departed: dict[str, Callable[[], bool]] = {}
        self._exited: set[str] = set()
        self._cut: set[str] = set()
        self._why: dict[str, str] = {}

    # Watched processes

    def knows(self, fd: int, fabric_id: str) -> bool:
        """Whether `watch` was called for a process. It needs no lock."""
        if fd < 0:
            return fabric_id in self._departed
        return self._watched.get(fd) == fabric_id

    def watch(self, fd: int, fabric_id: str, departed: Callable[[], bool]) -> None:
        """Watch a process of this host: see `Fabric.watch`."""
        self._departed[fabric_id] = departed
        if fd < 0:
            return
        # A number may come again: closing forgets the one before.
        self._watched[fd] = fabric_id
        with suppress(FileExistsError):
            self._epoll.register(fd, select.EPOLLIN)

    def __contains__(self, fd: int) -> bool:
        """Whether a descriptor is watched."""
        return fd in self._watched

    def ended(self, fd: int) -> None:
        """Take in that a watched descriptor is readable."""
        self._epoll.unregister(fd)
        fabric_id = self._watched.pop(fd)
        self._exited.add(fabric_id)
        self.ends[fabric_id] = how_ended(fd)
        if self.has_parted(fabric_id):
            self.parted.add(fabric_id)
        self._departed.pop(fabric_id, None)  # it refers to the memory of the process
        self.suspects[fabric_id] = time.monotonic() + GRACE_S

    def is_watched(self, fabric_id: str) -> bool:
        """Whether the end of a process is seen without any link to it."""
        return fabric_id in self._exited or fabric_id in self._departed

    def has_parted(self, fabric_id: str) -> bool:
        """Whether a process is known to have closed everything in good order."""
        departed = self._departed.get(fabric_id)
        return fabric_id in self.parted or (departed is not None and departed())

    # Processes that are gone

    def suspect(self, fabric_id: str, why: str) -> None:
        """Hold a process for gone after a moment, unless there is a link to it by then.

        Args:
            fabric_id: The process.
            why: Why there was none.
        """
        self._why[fabric_id] = why
        self.suspects.setdefault(fabric_id, self._moment(fabric_id))

    def cut_off(self, fabric_id: str, why: str) -> None:
        """Take in that a link to a process has ended."""
        self._cut.add(fabric_id)
        self._why.setdefault(fabric_id, why)
        self.suspects.setdefault(fabric_id, self._moment(fabric_id))

    def _moment(self, fabric_id: str) -> float:
        """Return the end of the time in which evidence of the end of a process is awaited."""
        return time.monotonic() + (GRACE_S if self.has_parted(fabric_id) else LOST_S)

    def why_lost(self, fabric_id: str) -> str:
        """Return why the connection to a process was lost."""
        return self._why.get(fabric_id, "no answer")

    def is_alive(self, fabric_id: str) -> bool:
        """Whether this process knows by itself that another one has not ended: it watches that one."""
        return fabric_id in self._departed and not self.has_parted(fabric_id)

    def has_ended(self, fabric_id: str) -> bool:
        """Whether this process has seen that another one has ended."""
        return fabric_id in self._exited

    def overdue(self) -> list[str]:
        """Return those whose moment is over, and suspect them no more."""
        now = time.monotonic()
        overdue = [fabric_id for fabric_id, since in self.suspects.items() if since <= now]
        for fabric_id in overdue:
            del self.suspects[fabric_id]
        return overdue

    def was_cut_off(self, fabric_id: str) -> bool:
        """Whether a process has ended, or a link to it."""
        return fabric_id in self._exited or fabric_id in self._cut

    def has_died(self, fabric_id: str) -> bool:
        """Whether a process is known to have ended, and not in good order."""
        return fabric_id in self.dead or (fabric_id in self._exited and fabric_id not in self.parted)
