"""`Completion`: a one-time event with callbacks: a `Future` without a result.

Most complete before any thread waits, so the lock for sleeping is made when the first one does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dist2.runtime.signals import OnCtrlC, on_ctrl_c

log = logging.getLogger("dist2.runtime.completion")

Callback = Callable[["Completion"], None]


@on_ctrl_c(OnCtrlC.DEFER)
class Completion:
    """Is done once, with an error or without."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_sleepers")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may find its own thread in here
        self._done = False
        self._error: BaseException | None = None
        self._callbacks: list[Callback] = []
        self._sleepers: list[threading.Lock] = []

    def done(self) -> bool:
        """Whether it is."""
        return self._done

    def set_result(self, result: None) -> None:
        """Be done."""
        self._end(None)

    def set_exception(self, error: BaseException) -> None:
        """Be done, with an error."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                raise RuntimeError("it is done already")
            self._error, self._done = error, True
            callbacks, self._callbacks = self._callbacks, []
            sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.release()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callback) -> None:
        try:
            callback(self)
        except Exception:  # like a Future: an error in a callback must not reach the completing thread
            log.exception("a callback of an operation raised: %r", callback)

    def add_done_callback(self, callback: Callback) -> None:
        """Call back when it is done: at once if it is, else from the thread that ends it."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until it is done; return the error.

        Raises:
            TimeoutError: It is not done after this many seconds.
        """
        if not self._done:
            self._sleep(timeout)
        return self._error

    def result(self) -> None:
        """Wait until it is done; raise the error."""
        error = self.exception()
        if error is not None:
            try:
                raise error
            finally:
                del error  # a traceback that leads to itself is only found by a collection

    def _sleep(self, timeout: float | None) -> None:
        sleeper = threading.Lock()
        sleeper.acquire()
        with self._lock:
            if self._done:
                return
            self._sleepers.append(sleeper)
        if not sleeper.acquire(timeout=-1 if timeout is None else timeout):
            with self._lock:
                if not self._done:
                    self._sleepers.remove(sleeper)
                    raise TimeoutError
