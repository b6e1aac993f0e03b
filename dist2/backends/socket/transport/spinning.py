# cython: annotation_typing=False
"""`Spinning`: how long a waiter polls before it sleeps. `Crowd`: whether it should sleep at once.

A message that is on its way comes within microseconds, and waking a sleeper takes longer. But where
another process needs the core, looking keeps off the very process that is waited for; and a thread that
yields to a process that computes comes back milliseconds later, when that one has used its turn, whereas a
sleeper is woken at once. So when one yield after the other was slow, waits sleep for a while.
"""

from __future__ import annotations

import ctypes
from time import monotonic_ns

from dist2.runtime.built import check_built

check_built(__name__, __file__)

AWAKE_NS = 1_000_000
SLOW_NS = 200_000
"""Longer yields mean that another process uses the core,"""
_PAUSE_NS = 4_000_000
"""and that no thread yields for this time; twice as long if yields are still slow then, and so on,"""
_LONGEST_PAUSE_NS = 50_000_000
"""up to this. One slow yield alone means nothing: a thread of the system was due."""

yield_core = ctypes.CDLL(None).sched_yield
"""Unlike ``os.sched_yield`` of Python 3.11, it gives up the interpreter lock."""


class Crowd:
    """An estimate, from slow yields of a process, of other users of the cores."""

    def __init__(self) -> None:
        self._until = 0
        self._pause = _PAUSE_NS
        self._slow = 0

    def is_here(self, now_ns: int) -> bool:
        """Whether to sleep rather than to yield."""
        return now_ns < self._until

    def give_way(self) -> int:
        """Yield the core; return the monotonic nanosecond after it."""
        before = monotonic_ns()
        yield_core()
        now = monotonic_ns()
        if now - before <= SLOW_NS:
            self._slow = 0
            return now
        self._slow += 1
        if self._slow > 1:
            self._note(now)
        return now

    def _note(self, now_ns: int) -> None:
        """Take in that yields are slow."""
        lasting = now_ns - self._until < self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_NS) if lasting else _PAUSE_NS
        self._until = now_ns + self._pause


class Spinning:
    """Decides how long one wait polls before it sleeps.

    Args:
        spins: 0: sleep at once.
        crowd: The process's `Crowd`.
    """

    def __init__(self, spins: int, crowd: Crowd) -> None:
        self._until = 0
        self._crowd = crowd
        self._looks = bool(spins)

    def at(self, now_ns: int, is_amid: bool = False) -> bool:
        """Whether to look again rather than sleep; call once a turn.

        Args:
            now_ns: The time.
            is_amid: The rest of a frame is on its way: look even without spins.
        """
        if not (self._looks or is_amid):
            return False
        if not self._until:
            self._until = now_ns + AWAKE_NS
        looks = now_ns <= self._until and not self._crowd.is_here(now_ns)
        self._looks = self._looks and looks
        return looks
