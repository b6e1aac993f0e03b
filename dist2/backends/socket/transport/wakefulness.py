"""`Wakefulness`: how long a waiter looks before it sleeps.

A message that is on its way comes within microseconds, and waking a sleeper takes longer. But where
somebody else needs the core, looking keeps off the very process that is waited for: then a yield takes
long, and the waiter goes to sleep.
"""

from __future__ import annotations

import ctypes

AWAKE_NS = 1_000_000
SLOW_NS = 200_000

yield_core = ctypes.CDLL(None).sched_yield
"""Unlike ``os.sched_yield`` of Python 3.11, it gives up the interpreter lock."""


class Wakefulness:
    """Of one wait.

    Args:
        spins: 0: sleep at once.
    """

    def __init__(self, spins: int) -> None:
        self._until = 0
        self._before = 0
        self._budget = AWAKE_NS if spins else 0

    def at(self, now_ns: int) -> bool:
        """Whether to look again rather than sleep; call once a turn."""
        if not self._budget:
            return False
        if not self._before:
            self._until = now_ns + self._budget
        elif now_ns > self._until or now_ns - self._before > SLOW_NS:
            self._budget = 0
            return False
        self._before = now_ns
        return True
