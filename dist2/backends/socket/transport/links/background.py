"""`Background`: the thread that makes progress on a process's messages and links while no other thread does.

A rank that computes has done its part of the last operation and does not poll. Without the thread it would
not complete asynchronous messages, answer questions about its calls, or forward reports of deaths.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dist2.errors import ResourceError
from dist2.runtime.deadline import monotonic_ns, note_wait
from dist2.runtime.lock import Lock
from dist2.runtime.resources import scarce_resources
from dist2.runtime.threads import Worker

log = logging.getLogger("dist2.fabric")

_IDLE_S = 2.0
_TICK_S = 0.001
_JOIN_S = 2.0


class Background:
    """A thread from the first `start` or `attend` until `stop`.

    Args:
        lock: Held while the thread is started, and while it is asked whether there is anything to do.
        is_busy: Whether messages are pending that no thread waits for; with the lock.
        work: Makes progress on them; called a moment after `is_busy` has said so, again and again.
        look: Looks after the links. Neither function may raise.
        period_s: How often it looks, in seconds; 0 for never.
    """

    def __init__(
        self,
        lock: Lock,
        is_busy: Callable[[], bool],
        work: Callable[[], None],
        look: Callable[[], None],
        period_s: float,
    ) -> None:
        self._lock = lock
        self._is_busy = is_busy
        self._work = work
        self._look = look
        self._period_s = period_s
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._dozes = False
        self._ended = False
        self._is_told = False

    def start(self) -> None:
        """Make progress on messages from now on; with the lock.

        Raises:
            ResourceError: The system refuses a thread.
        """
        if self._thread is None and not self._ended:
            thread = Worker("dist2-progress", self._run, end=self._end)
            with scarce_resources():
                thread.start()
            self._thread = thread
        elif self._dozes:
            self._woken.set()

    def attend(self) -> None:
        """Look after links from now on; with the lock.

        Operations look too, so a process that may start no thread works; the next call tries again.
        """
        if not self._period_s or self._thread is not None:
            return
        try:
            self.start()
        except ResourceError as error:
            if not self._is_told:
                log.warning("this process answers other ranks only while it calls operations: %s", error)
            self._is_told = True

    def stop(self) -> None:
        """End the thread, and wait for it; without the lock."""
        self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _end(self) -> None:
        self._ended = True
        self._woken.set()

    def _run(self) -> None:
        busy_at = looked_at = time.monotonic()
        began_ns = monotonic_ns()
        while not self._ended:
            with self._lock:
                busy, now = self._is_busy(), time.monotonic()
                busy_at = now if busy else busy_at
                self._dozes = now - busy_at > _IDLE_S
            # A moment each time, for threads that are about to wait.
            pause_s = self._period_s if self._dozes else _TICK_S
            self._woken.wait(pause_s or None)
            self._woken.clear()
            if busy:  # before it fails what is overdue
                note_wait(began_ns, began_ns + int(pause_s * 1e9))
            began_ns = monotonic_ns()
            if busy and not self._ended:
                self._work()
            if self._period_s and not self._ended and time.monotonic() - looked_at >= self._period_s:
                looked_at = time.monotonic()
                self._look()
