"""Threads that end with the process, and locks that are waited for no longer than a limit.

A daemon thread that returns from torch's C++ after the interpreter has ended takes the process down
(``terminate called without an active exception``). So a thread that may be inside of C++ is a `Worker`: the
end of the interpreter waits a moment for it, after the operations that it waits for were aborted.

While the process ends no thread starts: Python 3.12 and later refuse that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from dist2.runtime.deadline import remaining_s

_process_ends = False


def start_no_more() -> None:
    """Start no worker from now on: the process ends."""
    global _process_ends
    _process_ends = True


class Worker(threading.Thread):
    """A daemon thread that completes operations, or destroys C++ objects.

    While the process ends it does not start: the operations are aborted then, and the objects are left alone.

    Args:
        name: The thread's name.
        target: The function that it runs.
        args: The function's arguments.
        end: Asks the thread to end soon; does nothing where closing all groups ends it.
    """

    def __init__(
        self, name: str, target: Callable[..., None], *args: Any, end: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)
        self.end = end

    def start(self) -> None:
        """Start, unless the process ends."""
        if not _process_ends:
            super().start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread, if it was started."""
        if self.ident is not None:
            super().join(timeout)


def end_workers(deadline_ns: int) -> None:
    """Have all workers of this process end, and wait for them; all groups are closed."""
    workers = [thread for thread in threading.enumerate() if isinstance(thread, Worker)]
    for worker in workers:
        if worker.end is not None:
            worker.end()
    for worker in workers:
        worker.join(remaining_s(deadline_ns))


@contextmanager
def lock_with_timeout(lock: RLock, limit_s: float | None) -> Iterator[bool]:
    """Hold a lock for the length of a block. The block gets whether it was acquired in time.

    Signal handlers run when a function in C has returned, and so between `acquire` and the code that notes
    its result: a handler that raises there must not leave the lock taken. Only the owner of a reentrant lock
    can release it, so an attempt is right in any case.

    It is a generator, and no class with `__exit__`: if a handler raised as that begins, the lock
    would stay taken. A generator releases it when it is closed, with the last reference to the exception.

    Args:
        lock: A reentrant one.
        limit_s: How long to wait for it, in seconds; None for as long as it takes.
    """
    timeout_s = -1.0 if limit_s is None else limit_s
    try:
        yield lock.acquire(timeout=timeout_s)
    finally:
        try:  # noqa: SIM105 - signal handlers could also run inside of `suppress`
            lock.release()
        except RuntimeError:
            pass  # it was not acquired in time
