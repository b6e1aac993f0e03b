"""`PrefixStore`: the part of another store whose keys begin with a prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

from torch.distributed import FileStore
from torch.distributed import Store as TorchStore

from dist2.errors import InvalidUsageError, StoreTimeoutError
from dist2.runtime.arguments import check_store
from dist2.runtime.deadline import Deadline
from dist2.store.base import Store, limit_of, without_prefixes
from dist2.store.table import counted
from dist2.store.text import as_key, as_name

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _OFTEN_S = 0.0003, 0.01, 0.02


class PrefixStore(Store):
    """Another store, seen through keys that begin with ``prefix/``.

    It has the timeout of the store below, and setting it sets that one's too, as in torch. `num_keys` counts
    all keys of the store below. Over a `TCPStore` it has that one's ``host`` and ``port``.

    Args:
        prefix: First part of the keys.
        store: Any store, dist2's or torch's.

    Raises:
        InvalidUsageError: ``store`` is None.

    Examples:
        >>> store = dist2.HashStore()
        >>> dist2.PrefixStore("epoch 1", store).set("key", "value")
        >>> store.get("epoch 1/key")
        b'value'
    """

    def __init__(self, prefix: str, store: TorchStore) -> None:
        if store is None:
            raise InvalidUsageError("store argument cannot be None")
        check_store(store)
        self._prefix = as_key(prefix) + b"/"
        # torch's stub file lacks some methods of its stores (timeout, append, multi_set, clone, …).
        self._below = cast("Any", store)
        super().__init__(self._below.timeout)

    def __getattr__(self, name: str) -> Any:
        """Return the address of the server below, if there is one."""
        if name in ("host", "port"):
            return getattr(without_prefixes(self), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def underlying_store(self) -> TorchStore:
        """The store that was given."""
        store: TorchStore = self._below
        return store

    @property
    def _underlying_non_prefix_store(self) -> TorchStore:
        """The store below all prefixes, dist2's and torch's."""
        return without_prefixes(self)

    @property
    def timeout(self) -> timedelta:
        """How long calls may block; zero means no limit."""
        own = super().timeout
        # C++ sets only the copy in the base, which then stands until it is set back.
        below: timedelta = self._below.timeout
        return own if own != self._mirrored else below

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long calls may block, here and in the store below; zero means no limit.

        Args:
            timeout: A `timedelta` or seconds.
        """
        super().set_timeout(timeout)
        self._mirrored = super().timeout
        if self._below.timeout != self._mirrored:
            self._below.set_timeout(self._mirrored)

    def has_extended_api(self) -> bool:
        """Whether the store below has them."""
        return bool(self._below.has_extended_api())

    def clone(self) -> PrefixStore:
        """Return another store over the same keys, with a separate timeout."""
        return PrefixStore(as_name(self._prefix[:-1]), self._below.clone())

    def note_server(self, words: str) -> None:
        """Tell the store below."""
        if isinstance(self._below, Store):
            self._below.note_server(words)

    def _set(self, key: bytes, value: bytes) -> None:
        self._below.set(self._full(key), value)

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        with self._without_prefix():
            self._await((key,), deadline)
            value: bytes = self._below.get(self._full(key))
        return value

    def _add(self, key: bytes, amount: int) -> int:
        with self._without_prefix():
            try:
                return int(self._below.add(self._full(key), amount))
            except (ValueError, IndexError) as error:  # of torch's HashStore and FileStore
                if isinstance(error, InvalidUsageError):
                    raise
                counted(key, self._below.get(self._full(key)), amount)
                raise

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        held: bytes = self._below.compare_set(self._full(key), expected, desired)
        return held

    def _append(self, key: bytes, value: bytes) -> None:
        self._below.append(self._full(key), value)

    def _delete(self, key: bytes) -> bool:
        return bool(self._below.delete_key(self._full(key)))

    def _num_keys(self) -> int:
        return int(self._below.num_keys())

    def _list_keys(self) -> list[bytes]:
        names = map(as_key, self._below.list_keys())
        return [name[len(self._prefix) :] for name in names if name.startswith(self._prefix)]

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        return bool(self._below.check(self._full_all(keys)))

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        with self._without_prefix():
            self._look_often(keys, deadline)
            self._below.wait(self._full_all(keys), limit_of(deadline))

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        with self._without_prefix():
            self._await(keys, deadline)
            return list(self._below.multi_get(self._full_all(keys)))

    def _fetch(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        if isinstance(self._below, Store):
            return self._below._fetch(tuple(self._prefix + key for key in keys), deadline)
        return list(self._below.multi_get(self._full_all(keys)))

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        self._below.multi_set(self._full_all(keys), list(values))

    def _push(self, key: bytes, value: bytes) -> None:
        self._below.queue_push(self._full(key), value)

    def _pop(self, key: bytes, deadline: Deadline | None) -> bytes:
        if deadline is not None and not self._below_keeps(deadline):
            self._wait((key,), deadline)
        with self._without_prefix():
            item: bytes = self._below.queue_pop(self._full(key), deadline is not None)
        return item

    def _queue_length(self, key: bytes) -> int:
        return int(self._below.queue_len(self._full(key)))

    def _await(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        """Have keys there before the store below is asked for them, unless it waits by itself."""
        if self._below_keeps(deadline):
            self._look_often(keys, deadline)
        else:
            self._wait(keys, deadline)

    def _look_often(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        """Poll more often than stores that look only every 10 ms: ranks that meet wait several times."""
        if isinstance(self._below, Store) or not isinstance(self._underlying_non_prefix_store, FileStore):
            return
        names = self._full_all(keys)
        for _ in deadline.soon(_OFTEN_S).tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
            if self._below.check(names):
                return

    @contextmanager
    def _without_prefix(self) -> Iterator[None]:
        """Let errors name keys as the caller did: a prefix may be one of dist2's own."""
        try:
            yield
        except (StoreTimeoutError, InvalidUsageError) as error:
            error.args = (str(error).replace(as_name(self._prefix), ""),)
            raise

    def _full(self, key: bytes) -> str:
        return as_name(self._prefix + key)

    def _full_all(self, keys: Sequence[bytes]) -> list[str]:
        return list(map(self._full, keys))

    def _below_keeps(self, deadline: Deadline) -> bool:
        """Whether the store below would wait as long by itself."""
        below: timedelta = self._below.timeout
        return below.total_seconds() == deadline.timeout_s
