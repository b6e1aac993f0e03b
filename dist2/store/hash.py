"""`HashStore`: a store inside one process, for ranks as threads and for tests.

Signal handlers may raise wherever a function begins or has returned. So ``with`` takes and releases the lock
itself, which is in C, in single steps; the methods of `threading.Condition` are in Python. A change wakes the
waiting threads first: they need the lock to look, and so see it. So an interrupted change is never missed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

from dist2.errors import QueueEmptyError
from dist2.runtime.deadline import Deadline
from dist2.store.base import DEFAULT_TIMEOUT, Store, wait_timed_out
from dist2.store.table import Table

_T = TypeVar("_T")


class _Shared:
    """State that a store and its clones share."""

    def __init__(self) -> None:
        self.table = Table()
        self.lock = threading.RLock()
        self.waiting: set[SimpleQueue[None]] = set()

    def wake(self) -> None:
        """Wake all threads that wait, before a change: under the lock, which they need to look at it."""
        for bell in tuple(self.waiting):
            bell.put(None)


class HashStore(Store):
    """A store in the memory of this process, shared by its threads; as torch's of that name.

    `clone` returns another handle on the same keys.

    Args:
        timeout: How long calls may block: a `timedelta` or seconds; zero means no limit.

    Examples:
        >>> store = dist2.HashStore()
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
    """

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._shared = _Shared()

    def clone(self) -> HashStore:
        """Return another store over the same keys, with a separate timeout."""
        other = HashStore(self.timeout)
        other._shared = self._shared
        return other

    def _set(self, key: bytes, value: bytes) -> None:
        with self._shared.lock:
            self._shared.wake()
            self._shared.table.set(key, value)

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        return self._await(lambda: self._shared.table.get(key), (key,), deadline)

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        def look() -> list[bytes] | None:
            # A queue that has items ends a wait, but has no value to return.
            values = [value for value in map(self._shared.table.get, keys) if value is not None]
            return values if len(values) == len(keys) else None

        return self._await(look, keys, deadline)

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        with self._shared.lock:
            super()._multi_set(keys, values)

    def _add(self, key: bytes, amount: int) -> int:
        with self._shared.lock:
            self._shared.wake()
            return self._shared.table.add(key, amount)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        with self._shared.lock:
            self._shared.wake()
            return self._shared.table.compare_set(key, expected, desired)

    def _append(self, key: bytes, value: bytes) -> None:
        with self._shared.lock:
            self._shared.wake()
            self._shared.table.append(key, value)

    def _delete(self, key: bytes) -> bool:
        with self._shared.lock:
            return self._shared.table.delete(key)

    def _num_keys(self) -> int:
        with self._shared.lock:
            return len(self._shared.table)

    def _list_keys(self) -> tuple[bytes, ...]:
        with self._shared.lock:
            return self._shared.table.keys()

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        with self._shared.lock:
            return all(key in self._shared.table for key in keys)

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        self._await(lambda: self._check(keys) or None, keys, deadline)

    def _await(self, look: Callable[[], _T | None], keys: tuple[bytes, ...], deadline: Deadline) -> _T:
        """Run a function under the lock after each change, until it returns a result other than None."""
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            self._shared.waiting.add(bell)
            while True:
                over = deadline.passed
                with self._shared.lock:
                    found = look()
                if found is not None:
                    return found
                if over:
                    raise wait_timed_out(keys, deadline)
                with suppress(Empty):
                    bell.get(timeout=deadline.remaining_s())
        finally:
            self._shared.waiting.discard(bell)

    def _push(self, key: bytes, value: bytes) -> None:
        with self._shared.lock:
            self._shared.wake()
            self._shared.table.push(key, value)

    def _pop(self, key: bytes, deadline: Deadline | None) -> bytes:
        if deadline is not None:
            return self._await(lambda: self._shared.table.pop(key), (key,), deadline)
        with self._shared.lock:
            item = self._shared.table.pop(key)
        if item is None:
            raise QueueEmptyError(f"queue is empty: {key.decode(errors='replace')}")
        return item

    def _queue_length(self, key: bytes) -> int:
        with self._shared.lock:
            return self._shared.table.queue_length(key)
