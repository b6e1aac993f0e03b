"""`Store`: keys with values that all ranks see, and what every kind of store does alike.

A plain Python subclass of torch's `Store`, so that torch's C++ (process groups, `PrefixStore`) may hold
one. Semantics are those of torch 2.13, kept by ``tests/store/test_conformance_of_stores.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

from torch.distributed import Store as TorchStore

from dist2.errors import (
    ArgumentTypeError,
    InvalidUsageError,
    StoreError,
    StoreTimeoutError,
    StoreUnsupportedError,
)
from dist2.runtime.arguments import as_int, check_world_size
from dist2.runtime.cpp_ownership import Pins, held_by_cpp
from dist2.runtime.deadline import Deadline, checked_timeout
from dist2.store.text import Text, as_key, as_keys, as_name, as_value

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""As torch has it."""

_MILLISECOND = timedelta(milliseconds=1)


class Store(TorchStore):
    """Keys with values, shared by ranks; the base of all of dist2's stores.

    Calls block no longer than `timeout`, or their own ``timeout`` argument; zero means no limit. A store
    may be used from several threads. It gives up what it holds (connections, threads, files) with `close`,
    or when nobody holds it any more, C++ included.

    A kind of store overrides the methods with a leading underscore, which get keys and values as bytes.
    """

    _closed = True

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._closed = False
        for store in pinned.no_longer_held():
            store.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # Kept as a default: when the interpreter ends, names of modules may be None by now.
        if self._closed or ends():
            return
        if held_by_cpp(self):
            pinned.pin(self)
        else:
            self.close()

    def close(self) -> None:
        """Give up what the store holds; later calls raise. May be called twice."""
        if self._closed:
            return
        self._closed = True
        pinned.unpin(self)
        self._release()

    # Values

    def set(self, key: Text, value: Text) -> None:
        """Give a key a value."""
        self._set(as_key(key), as_value(value))

    def get(self, key: Text) -> bytes:
        """Return a key's value; wait until it has one.

        Raises:
            StoreTimeoutError: It had none in time.
        """
        return self._get(as_key(key), self._deadline())

    def add(self, key: Text, value: int) -> int:
        """Add to a counter, which starts at 0, and return its new value (also readable as decimal text).

        Raises:
            InvalidUsageError: The key holds no integer, or the sum does not fit 64 bits.
        """
        amount = as_int(value)
        if amount is None or not -(1 << 63) <= amount < 1 << 63:
            raise ArgumentTypeError(f"value must be a 64-bit int, got {value!r} ({type(value).__name__})")
        return self._add(as_key(key), amount)

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """Set a key if it holds the expected value; return what it holds then.

        A missing key is set only if ``expected_value`` is empty; otherwise ``expected_value`` is returned.
        """
        return self._compare_set(as_key(key), as_value(expected_value), as_value(desired_value))

    def append(self, key: Text, value: Text) -> None:
        """Lengthen a key's value, which starts empty."""
        self._append(as_key(key), as_value(value))

    def delete_key(self, key: Text) -> bool:
        """Remove a key; return whether there was one."""
        return self._delete(as_key(key))

    def num_keys(self) -> int:
        """Return how many keys there are, with those that stores keep for themselves, without queues."""
        return self._num_keys()

    def list_keys(self) -> list[str]:
        """Return the names of all keys but those that stores keep for themselves, in any order."""
        return [as_name(key) for key in self._list_keys()]

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        """Return the values of keys; wait until all have one.

        Raises:
            StoreTimeoutError: Some had none in time.
        """
        return self._multi_get(as_keys(keys), self._deadline())

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Give keys their values.

        Raises:
            InvalidUsageError: There are not as many values as keys.
        """
        names = as_keys(keys)
        if len(names) != len(values):
            raise InvalidUsageError(
                f"multi_set: keys and values must be of same size, got {len(names)} and {len(values)}"
            )
        self._multi_set(names, tuple(map(as_value, values)))

    # Waiting

    def check(self, keys: Sequence[Text]) -> bool:
        """Return whether all keys have a value (or are queues that have an item)."""
        return self._check(as_keys(keys))

    def wait(self, keys: Sequence[Text], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys have a value (or are queues that have an item).

        Args:
            keys: What to wait for.
            timeout: A `timedelta` or seconds instead of the store's; zero means no limit.

        Raises:
            StoreTimeoutError: Not all had one in time.
        """
        self._wait(as_keys(keys), self._deadline(timeout))

    def barrier(self, key: Text, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until so many callers have come to the barrier of that name, counting from its first use.

        Raises:
            StoreTimeoutError: They had not come in time.
        """
        self._barrier(as_key(key), check_world_size(world_size), self._deadline(timeout))

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        """Put an item at the end of a queue. Queues have names of their own, apart from keys."""
        self._push(as_key(key), as_value(value))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the first item of a queue; wait for one if ``block``.

        Raises:
            QueueEmptyError: There is none, and ``block`` is false.
            StoreTimeoutError: None came in time.
        """
        return self._pop(as_key(key), self._deadline() if block else None)

    def queue_len(self, key: Text) -> int:
        """Return how many items a queue has."""
        return self._queue_length(as_key(key))

    # The store itself

    @property
    def timeout(self) -> timedelta:
        """How long calls may block; zero means no limit."""
        # torch's stub file lacks it.
        timeout: timedelta = TorchStore.timeout.__get__(self)  # type: ignore[attr-defined]  # not in torch's stubs
        return timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long calls may block: a `timedelta` or seconds; zero means no limit."""
        # C++ reads and sets the copy in the base, so that one is the truth. It counts whole milliseconds:
        # what is shorter must not become zero, which means no limit.
        super().set_timeout(-(-checked_timeout(timeout) // _MILLISECOND) * _MILLISECOND)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are one step each."""
        return True

    def clone(self) -> Store:
        """Return another store over the same keys, with a timeout of its own."""
        raise NotImplementedError

    # C++ looks these two up by their C++ names.

    def deleteKey(self, key: Text) -> bool:  # noqa: N802 - C++ has this name
        """See `delete_key`."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802 - C++ has this name
        """See `num_keys`."""
        return self.num_keys()

    # What a kind of store must have

    def _release(self) -> None:
        """Give up what the store holds. Called once, on any thread, perhaps half constructed."""

    def _set(self, key: bytes, value: bytes) -> None:
        raise NotImplementedError

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        raise NotImplementedError

    def _add(self, key: bytes, amount: int) -> int:
        raise NotImplementedError

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        raise NotImplementedError

    def _append(self, key: bytes, value: bytes) -> None:
        raise NotImplementedError

    def _delete(self, key: bytes) -> bool:
        raise NotImplementedError

    def _num_keys(self) -> int:
        raise NotImplementedError

    def _list_keys(self) -> Sequence[bytes]:
        raise NotImplementedError

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        raise NotImplementedError

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        raise NotImplementedError

    # What it may have better

    def note_server(self, words: str) -> None:
        """Be told which process serves the store, for messages about its end."""

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        return [self._get(key, deadline) for key in keys]

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._set(key, value)

    def _barrier(self, key: bytes, world_size: int, deadline: Deadline) -> None:
        # The keys are those of torch's C++, so that its stores and ours meet at one barrier.
        if self._add(key + b"/num_members", 1) == world_size:
            self._set(key + b"/last_member", b"1")
        self._wait((key + b"/last_member",), deadline)

    def _push(self, key: bytes, value: bytes) -> None:
        self._refuse("queues")

    def _pop(self, key: bytes, deadline: Deadline | None) -> bytes:
        self._refuse("queues")

    def _queue_length(self, key: bytes) -> int:
        self._refuse("queues")

    # Helpers for kinds of store

    def _deadline(self, timeout: timedelta | float | None = None) -> Deadline:
        return Deadline.after(self.timeout if timeout is None else timeout)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"{type(self).__name__} is closed")

    def _refuse(self, what: str) -> NoReturn:
        raise StoreUnsupportedError(f"{what} are not implemented by {type(self).__name__}")


def wait_timed_out(keys: Sequence[bytes], deadline: Deadline) -> StoreTimeoutError:
    """Return the error of a wait that was not met, in torch's words."""
    names = ", ".join(map(as_name, keys))
    return StoreTimeoutError(f"Wait timeout after {deadline.milliseconds}ms, keys: {names}")


pinned: Pins[Store] = Pins()
"""Stores that only C++ holds."""
