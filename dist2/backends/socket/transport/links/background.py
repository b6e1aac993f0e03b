"""`Background`: a thread that makes progress on pending work that no other thread waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dist2.runtime.lock import Lock
from dist2.runtime.resources import scarce_resources
from dist2.runtime.threads import Worker

_IDLE_S = 2.0
_TICK_S = 0.001


class Background:
    """A thread that lives from the first `start` until two seconds without work.

    Args:
        lock: Guards whether the thread is there: held while it is asked whether there is anything to do.
        is_busy: Whether there is anything to do; with the lock.
        work: Does it, without the lock; called a moment after `is_busy` has said so, again and again.
    """

    def __init__(self, lock: Lock, is_busy: Callable[[], bool], work: Callable[[], None]) -> None:
        self._lock = lock
        self._is_busy = is_busy
        self._work = work
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def start(self) -> None:
        """Start the thread, unless it is there; with the lock.

        Raises:
            ResourceError: The system refuses a thread.
        """
        if self._thread is None and not self._ending.is_set():
            thread = Worker("dist2-progress", self._run, end=self._ending.set)
            with scarce_resources():
                thread.start()
            self._thread = thread

    def stop(self) -> threading.Thread | None:
        """Have the thread end soon; return it, to be joined without the lock."""
        self._ending.set()
        return self._thread

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._lock:
                busy = self._is_busy()
                if busy:
                    idle_since = time.monotonic()
                if self._ending.is_set() or time.monotonic() - idle_since > _IDLE_S:
                    self._thread = None
                    return
            # A moment each time, for threads that are about to wait.
            self._ending.wait(_TICK_S)
            if busy:
                self._work()
