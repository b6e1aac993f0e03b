"""`Waiters`: threads that each wait for one thing that cannot call back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from dist2.worker import Worker

IDLE_S = 2.0
"""How long an idle thread stays for the next job."""

Job = Callable[[], None]
"""Blocks until something is done, and tells. It must not raise."""


class Waiters:
    """As many threads as there are things waited for, so that no wait stands behind another.

    Threads start when needed, are used again, and end when idle: a group without such waits has none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = 0
        self._stopped = False

    def put(self, job: Job) -> None:
        """Run a job on a thread that has nothing else to do."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._jobs.put(job)
                return
        Worker(self._name, self._run, job).start()

    def stop(self) -> None:
        """End idle threads now, and the others after their job."""
        with self._lock:
            self._stopped = True
            for _ in range(self._idle):
                self._jobs.put(None)
            self._idle = 0

    def _run(self, job: Job | None) -> None:
        while job is not None:
            job()
            job = self._next()

    def _next(self) -> Job | None:
        with self._lock:
            if self._stopped:
                return None
            self._idle += 1
        try:
            return self._jobs.get(timeout=IDLE_S)
        except queue.Empty:
            return self._leave()

    def _leave(self) -> Job | None:
        """Stop being idle, unless a job was put for this thread at the last moment."""
        with self._lock:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                self._idle -= 1
                return None
