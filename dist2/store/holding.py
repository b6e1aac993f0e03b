"""`held`: a lock for the length of a block, waited for no longer than a limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock


@contextmanager
def held(lock: RLock, limit_s: float | None) -> Iterator[bool]:
    """Hold a lock for the length of a block, if it can be had in time; the block gets whether.

    Signal handlers run where a function in C has returned, and so between `acquire` and anything that notes
    its result: one that raises there must not leave the lock taken. Only the owner of a reentrant lock can
    release it, so that trying to is right in any case.

    It is a generator, and no class with `__exit__`: where a handler raises as that begins, nobody would come
    to release the lock any more. A generator does when it is closed, once nobody keeps the exception.

    Args:
        lock: A reentrant one.
        limit_s: How long to wait for it, in seconds; None for as long as it takes.
    """
    timeout_s = -1.0 if limit_s is None else limit_s
    try:
        yield lock.acquire(timeout=timeout_s)
    finally:
        try:  # noqa: SIM105 - what `suppress` calls is another place where handlers run
            lock.release()
        except RuntimeError:
            pass  # it was not had in time
