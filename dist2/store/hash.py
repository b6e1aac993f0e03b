"""`HashStore`: a store inside one process, for ranks as threads and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from dist2.errors import QueueEmptyError
from dist2.runtime.deadline import Deadline
from dist2.store.base import DEFAULT_TIMEOUT, Store, wait_timed_out
from dist2.store.table import Table


class _Shared:
    """State that a store and its clones share."""

    def __init__(self) -> None:
        self.table = Table()
        self.changed = threading.Condition()


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
        with self._shared.changed:
            self._shared.table.set(key, value)
            self._shared.changed.notify_all()

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        (value,) = self._multi_get((key,), deadline)
        return value

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        table = self._shared.table
        with self._shared.changed:
            # A queue that has items ends a wait, but has no value to return.
            self._await(lambda: all(table.get(key) is not None for key in keys), keys, deadline)
            return [table.get(key) or b"" for key in keys]

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        with self._shared.changed:
            super()._multi_set(keys, values)

    def _add(self, key: bytes, amount: int) -> int:
        with self._shared.changed:
            total = self._shared.table.add(key, amount)
            self._shared.changed.notify_all()
            return total

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        with self._shared.changed:
            held = self._shared.table.compare_set(key, expected, desired)
            self._shared.changed.notify_all()
            return held

    def _append(self, key: bytes, value: bytes) -> None:
        with self._shared.changed:
            self._shared.table.append(key, value)
            self._shared.changed.notify_all()

    def _delete(self, key: bytes) -> bool:
        with self._shared.changed:
            return self._shared.table.delete(key)

    def _num_keys(self) -> int:
        with self._shared.changed:
            return len(self._shared.table)

    def _list_keys(self) -> tuple[bytes, ...]:
        with self._shared.changed:
            return self._shared.table.keys()

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        with self._shared.changed:
            return all(key in self._shared.table for key in keys)

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        with self._shared.changed:
            self._await(lambda: all(key in self._shared.table for key in keys), keys, deadline)

    def _await(self, done: Callable[[], bool], keys: tuple[bytes, ...], deadline: Deadline) -> None:
        """Wait for a change that makes ``done``; the caller holds the condition."""
        if not self._shared.changed.wait_for(done, deadline.remaining_s()):
            raise wait_timed_out(keys, deadline)

    def _push(self, key: bytes, value: bytes) -> None:
        with self._shared.changed:
            self._shared.table.push(key, value)
            self._shared.changed.notify_all()

    def _pop(self, key: bytes, deadline: Deadline | None) -> bytes:
        table = self._shared.table
        with self._shared.changed:
            if deadline is not None:
                self._await(lambda: table.queue_length(key) > 0, (key,), deadline)
            item = table.pop(key)
        if item is None:
            raise QueueEmptyError(f"queue is empty: {key.decode(errors='replace')}")
        return item

    def _queue_length(self, key: bytes) -> int:
        with self._shared.changed:
            return self._shared.table.queue_length(key)
