"""`held`: a lock for the length of a block, waited for no longer than a limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock


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
