"""`LinkWatch`: polls a process's links periodically while no other thread does.

A rank that computes has done its part of the last operation and does not poll. Without this, it would neither
answer questions about its calls nor forward reports of deaths. A poll takes some microseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dist2.errors import ResourceError
from dist2.runtime.resources import scarce_resources
from dist2.runtime.threads import Worker

log = logging.getLogger("dist2.fabric")

_JOIN_S = 2.0


class LinkWatch:
    """A thread that calls a function every so often, from `start` to `stop`.

    Args:
        look: The function to call. It must not raise.
        period_s: How often, in seconds; 0 for never.
    """

    def __init__(self, look: Callable[[], None], period_s: float) -> None:
        self._look = look
        self._period_s = period_s
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._is_told = False

    def start(self) -> None:
        """Start looking, if it does not yet. Not to be called by two threads at once.

        Operations look too, so a process that may start no thread works; the next call tries again.
        """
        if self._thread is None and self._period_s and not self._ending.is_set():
            thread = Worker("dist2-link-watch", self._run, end=self._ending.set)
            try:
                with scarce_resources():
                    thread.start()
            except ResourceError as error:
                if not self._is_told:
                    log.warning("this process answers other ranks only while it calls operations: %s", error)
                self._is_told = True
            else:
                self._thread = thread

    def stop(self) -> None:
        """Look no more."""
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._ending.wait(self._period_s):
            self._look()
