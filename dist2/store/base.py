"""`Store`: keys with values that all ranks see, and the code that all kinds of store have in common.

A plain Python subclass of torch's `Store`, so that torch's C++ (process groups, `PrefixStore`) may hold
one. Semantics are those of torch 2.13, kept by ``tests/store/test_conformance_of_stores.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

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
_LONGEST = timedelta(days=24)
"""Longest wait of torch's stores: milliseconds that fit 31 bits."""


class Store(TorchStore):
    """Keys with values, shared by ranks; the base of all of dist2's stores.

    Calls block no longer than `timeout`, or their own ``timeout`` argument; zero means no limit. A store
    may be used from several threads. It releases its resources (connections, threads, files) with `close`,
    or with its last reference, C++'s included.

    A kind of store overrides the methods with a leading underscore, which get keys and values as bytes; or
    the public methods `set`, `get`, `add`, `check`, `wait` and others, as subclasses of torch's ``Store`` do.

    Args:
        timeout: How long calls may block: a `timedelta` or seconds; zero means no limit.

    Examples:
        >>> store = pg.get_group_store()
        >>> store.add("arrived", 1) in (1, 2)
        True
        >>> isinstance(store, dist2.Store)
        True
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
        if held_by_cpp(self) or not self._can_end():
            pinned.pin(self)
        else:
            self.close()

    def _can_end(self) -> bool:
        """Whether it may be closed now, by a garbage collection in whatever this thread does."""
        return True

    def close(self) -> None:
        """Release the store's resources; later calls that need them raise. May be called twice.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.close()
        """
        if self._closed:
            return
        self._closed = True
        pinned.unpin(self)
        self._release()

    # Values

    def set(self, key: Text, value: Text) -> None:
        """Give a key a value.

        Args:
            key: Name of the entry.
            value: Its new value.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set("key", "value")
            >>> store.get("key")
            b'value'
        """
        self._set(as_key(key), as_value(value))

    def get(self, key: Text) -> bytes:
        """Return a key's value; wait until it has one.

        Args:
            key: Name of the entry.

        Raises:
            StoreTimeoutError: It had none in time.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set("key", "value")
            >>> store.get("key")
            b'value'
        """
        return self._get(as_key(key), self._deadline())

    def add(self, key: Text, value: int) -> int:
        """Add to a counter, which starts at 0, and return its new value (also readable as decimal text).

        Args:
            key: Name of the counter.
            value: Number to add; may be negative.

        Raises:
            InvalidUsageError: The key holds no integer, or the sum does not fit 64 bits.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.add("counter", 3), store.add("counter", -1)
            (3, 2)
        """
        amount = as_int(value)
        if amount is None or not -(1 << 63) <= amount < 1 << 63:
            raise ArgumentTypeError(f"value must be a 64-bit int, got {value!r} ({type(value).__name__})")
        return self._add(as_key(key), amount)

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """Set a key if it has the expected value; return its value afterwards.

        A missing key is set only if ``expected_value`` is empty; otherwise ``expected_value`` is returned.

        Args:
            key: Name of the entry.
            expected_value: The key is set if it has this value.
            desired_value: The new value.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set("leader", "0")
            >>> store.compare_set("leader", "0", "1")
            b'1'
        """
        return self._compare_set(as_key(key), as_value(expected_value), as_value(desired_value))

    def append(self, key: Text, value: Text) -> None:
        """Lengthen a key's value, which starts empty.

        Args:
            key: Name of the entry.
            value: Text or bytes to add at the end.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.append("log", "one ")
            >>> store.append("log", "two")
            >>> store.get("log")
            b'one two'
        """
        self._append(as_key(key), as_value(value))

    def delete_key(self, key: Text) -> bool:
        """Remove a key; return whether there was one.

        Args:
            key: Name of the entry.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set("key", "value")
            >>> store.delete_key("key"), store.delete_key("key")
            (True, False)
        """
        return self._delete(as_key(key))

    def num_keys(self) -> int:
        """Return how many keys there are, with those that stores keep for themselves, without queues.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set("key", "value")
            >>> store.num_keys()
            1
        """
        return self._num_keys()

    def list_keys(self) -> list[str]:
        """Return the names of all keys but those that stores keep for themselves, in any order.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set("key", "value")
            >>> store.list_keys()
            ['key']
        """
        return [as_name(key) for key in self._list_keys()]

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        """Return the values of keys; wait until all have one.

        Args:
            keys: Names of the entries.

        Raises:
            StoreTimeoutError: Some had none in time.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.multi_set(["a", "b"], ["1", "2"])
            >>> store.multi_get(["a", "b"])
            [b'1', b'2']
        """
        return self._multi_get(as_keys(keys), self._deadline())

    def fetch(self, keys: Sequence[Text]) -> list[bytes]:
        """Return the values of keys that are known to be set: at a server, one round trip less.

        Args:
            keys: Names of entries that are set.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.multi_set(["a", "b"], ["1", "2"])
            >>> store.fetch(["a", "b"])
            [b'1', b'2']
        """
        return self._fetch(as_keys(keys), self._deadline())

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Give keys their values.

        Args:
            keys: Names of the entries.
            values: One for each key.

        Raises:
            InvalidUsageError: There are not as many values as keys.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.multi_set(["a", "b"], ["1", "2"])
            >>> store.get("b")
            b'2'
        """
        names = as_keys(keys)
        if len(names) != len(values):
            raise InvalidUsageError(
                f"multi_set: keys and values must be of same size, got {len(names)} and {len(values)}"
            )
        self._multi_set(names, tuple(map(as_value, values)))

    # Waiting

    def check(self, keys: Sequence[Text]) -> bool:
        """Return whether all keys have a value (or are queues that have an item).

        Args:
            keys: Names of entries or queues.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.check(["key"])
            False
        """
        return self._check(as_keys(keys))

    def wait(self, keys: Sequence[Text], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys have a value (or are queues that have an item).

        Args:
            keys: The keys to wait for.
            timeout: A `timedelta` or seconds instead of the store's; zero means no limit.

        Raises:
            StoreTimeoutError: Not all had one in time.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set("key", "value")
            >>> store.wait(["key"], timeout=5)
        """
        self._wait(as_keys(keys), self._deadline(timeout))

    def barrier(self, key: Text, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until ``world_size`` callers have reached the barrier of that name, since its first use.

        Args:
            key: Name of the barrier.
            world_size: Number of callers to wait for.
            timeout: A `timedelta` or seconds instead of the store's; zero means no limit.

        Raises:
            StoreTimeoutError: Too few reached it in time.

        Examples:
            >>> pg.get_group_store().barrier("all ranks are here", pg.size(), timeout=5)
        """
        self._barrier(as_key(key), check_world_size(world_size), self._deadline(timeout))

    # Queues

    def queue_push(self, key: Text, value: Text) -> None:
        """Put an item at the end of a queue. Queues have names of their own, apart from keys.

        Args:
            key: Name of the queue.
            value: The item.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.queue_push("jobs", "first")
            >>> store.queue_push("jobs", "second")
            >>> store.queue_len("jobs")
            2
        """
        self._push(as_key(key), as_value(value))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the first item of a queue; wait for one if ``block``.

        Args:
            key: Name of the queue.
            block: Wait while the queue is empty, up to `timeout`.

        Raises:
            QueueEmptyError: There is none, and ``block`` is false.
            StoreTimeoutError: The queue stayed empty.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.queue_push("jobs", "first")
            >>> store.queue_pop("jobs")
            b'first'
        """
        return self._pop(as_key(key), self._deadline() if block else None)

    def queue_len(self, key: Text) -> int:
        """Return how many items a queue has.

        Args:
            key: Name of the queue.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.queue_push("jobs", "first")
            >>> store.queue_len("jobs")
            1
        """
        return self._queue_length(as_key(key))

    # The store itself

    @property
    def timeout(self) -> timedelta:
        """How long calls may block; zero means no limit.

        Examples:
            >>> dist2.HashStore().timeout.total_seconds()
            300.0
        """
        # torch's stub file lacks it.
        timeout: timedelta = TorchStore.timeout.__get__(self)  # type: ignore[attr-defined]  # not in torch's stubs
        return timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long calls may block: a `timedelta` or seconds; zero means no limit.

        Args:
            timeout: The new limit.

        Examples:
            >>> store = dist2.HashStore()
            >>> store.set_timeout(30)
            >>> store.timeout.total_seconds()
            30.0
        """
        # C++ reads and sets the copy in the base, so that one is the truth. It counts whole milliseconds:
        # a shorter limit must not become zero, which means no limit.
        super().set_timeout(-(-checked_timeout(timeout) // _MILLISECOND) * _MILLISECOND)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are there, and one step each.

        Examples:
            >>> dist2.HashStore().has_extended_api()
            True
        """
        return type(self)._append is not Store._append or type(self).append is not Store.append

    def clone(self) -> Store:
        """Return another store over the same keys, with a separate timeout.

        Examples:
            >>> store = dist2.HashStore()
            >>> patient = store.clone()
            >>> patient.set_timeout(3600)
            >>> patient.timeout == store.timeout
            False
        """
        raise NotImplementedError

    # C++ looks these two up by their C++ names.

    def deleteKey(self, key: Text) -> bool:  # noqa: N802 - C++ has this name
        """See `delete_key`.

        Args:
            key: Name of the entry.

        Examples:
            >>> dist2.HashStore().deleteKey("key")
            False
        """
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802 - C++ has this name
        """See `num_keys`.

        Examples:
            >>> dist2.HashStore().getNumKeys()
            0
        """
        return self.num_keys()

    # Required of every kind of store; by default they call public methods that a subclass overrides

    def _release(self) -> None:
        """Release the resources. Called once, on any thread, perhaps on a half constructed store."""

    def _set(self, key: bytes, value: bytes) -> None:
        self._public("set")(as_name(key), value)

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        return bytes(self._public("get")(as_name(key)))

    def _add(self, key: bytes, amount: int) -> int:
        return int(self._public("add")(as_name(key), amount))

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._public("compare_set")(as_name(key), expected, desired))

    def _append(self, key: bytes, value: bytes) -> None:
        if self._overrides("append"):
            self.append(as_name(key), value)
        else:  # as torch's C++ does
            self._set(key, (self._get(key, self._deadline()) if self._check((key,)) else b"") + value)

    def _delete(self, key: bytes) -> bool:
        return bool(self._public("delete_key")(as_name(key)))

    def _num_keys(self) -> int:
        return int(self._public("num_keys")())

    def _list_keys(self) -> Sequence[bytes]:
        return [as_key(key) for key in self._public("list_keys")()]

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        return bool(self._public("check")([as_name(key) for key in keys]))

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        self._public("wait")([as_name(key) for key in keys], limit_of(deadline))

    def _public(self, name: str) -> Callable[..., Any]:
        """Return the public method that a subclass overrides, as subclasses of torch's ``Store`` do.

        Raises:
            NotImplementedError: It overrides neither that nor the method with an underscore.
        """
        if not self._overrides(name):
            raise NotImplementedError(f"{type(self).__name__} has no method {name}")
        method: Callable[..., Any] = getattr(self, name)
        return method

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Store, name)

    # Optional: better versions of the defaults

    def note_server(self, words: str) -> None:
        """Note the process that serves the store, for messages about its end."""

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        return [self._get(key, deadline) for key in keys]

    def _fetch(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        return self._multi_get(keys, deadline)

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._set(key, value)

    def _barrier(self, key: bytes, world_size: int, deadline: Deadline) -> None:
        # The keys are those of torch's C++, so that its stores and ours meet at one barrier.
        if self._add(key + b"/num_members", 1) == world_size:
            self._set(key + b"/last_member", b"1")
        try:
            self._wait((key + b"/last_member",), deadline)
        except StoreTimeoutError as error:
            arrived = self._add(key + b"/num_members", 0)
            raise barrier_timed_out(key, arrived, world_size, str(error)) from None

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


def without_prefixes(store: TorchStore) -> TorchStore:
    """Return the store below all prefixes, dist2's and torch's."""
    while isinstance(below := getattr(store, "underlying_store", None), TorchStore):
        store = below
    return store


def limit_of(deadline: Deadline) -> timedelta:
    """Return the remaining time as a limit for any store; zero would mean no limit to some.

    torch's stores cut it to milliseconds, and so it is rounded up: none gives up before the deadline.
    """
    left_s = deadline.remaining_s()
    if left_s is None:
        return _LONGEST
    milliseconds = -(-timedelta(seconds=left_s) // _MILLISECOND)
    return min(max(milliseconds, 1) * _MILLISECOND, _LONGEST)


def wait_timed_out(keys: Sequence[bytes], deadline: Deadline) -> StoreTimeoutError:
    """Return the error of a wait that was not met, in torch's words."""
    names = ", ".join(map(as_name, keys))
    return StoreTimeoutError(f"Wait timeout after {deadline.milliseconds}ms, keys: {names}")


def barrier_timed_out(key: bytes, arrived: int, world_size: int, why: str) -> StoreTimeoutError:
    """Return the error of a barrier that too few callers reached.

    Args:
        key: The barrier's name.
        arrived: Number of callers that reached it.
        world_size: Number of callers that it waits for.
        why: The timeout, in torch's words.
    """
    return StoreTimeoutError(f"barrier {as_name(key)!r}: {arrived} of {world_size} callers arrived. {why}")


pinned: Pins[Store] = Pins()
"""Stores that only C++ holds."""
