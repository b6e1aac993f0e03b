"""`PrefixStore`: a part of another store, whose keys begin with a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from torch.distributed import FileStore
from torch.distributed import PrefixStore as TorchPrefixStore
from torch.distributed import Store as TorchStore

from dist2.errors import InvalidUsageError
from dist2.runtime.arguments import check_store
from dist2.runtime.deadline import Deadline
from dist2.store.base import Store
from dist2.store.text import as_key, as_name

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _OFTEN_S = 0.0003, 0.01, 0.02
_SHORTEST = timedelta(milliseconds=1)
_LONGEST = timedelta(days=24)
"""What torch's stores can wait at most: milliseconds that fit 31 bits."""


class PrefixStore(Store):
    """Another store, seen through keys that begin with ``prefix/``.

    It has the timeout of the store below, and setting it sets that one's too, as in torch. What it counts
    (`num_keys`) is the store below.

    Args:
        prefix: What the keys begin with.
        store: Any store, dist2's or torch's.

    Raises:
        InvalidUsageError: ``store`` is None.
    """

    def __init__(self, prefix: str, store: TorchStore) -> None:
        if store is None:
            raise InvalidUsageError("store argument cannot be None")
        check_store(store)
        self._prefix = as_key(prefix) + b"/"
        # torch's stub file lacks some of what its stores have (timeout, append, multi_set, clone, …).
        self._below = cast("Any", store)
        super().__init__(self._below.timeout)

    @property
    def underlying_store(self) -> TorchStore:
        """The store that was given."""
        store: TorchStore = self._below
        return store

    @property
    def _underlying_non_prefix_store(self) -> TorchStore:
        """The store below all prefixes, dist2's and torch's."""
        store: Any = self._below
        while isinstance(store, (PrefixStore, TorchPrefixStore)):
            store = store.underlying_store
        found: TorchStore = store
        return found

    @property
    def timeout(self) -> timedelta:
        """How long calls may block; zero means no limit."""
        own = super().timeout
        # C++ sets only the copy in the base, which then stands until it is set back.
        below: timedelta = self._below.timeout
        return own if own != self._mirrored else below

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set how long calls may block, here and in the store below; zero means no limit."""
        super().set_timeout(timeout)
        self._mirrored = super().timeout
        if self._below.timeout != self._mirrored:
            self._below.set_timeout(self._mirrored)

    def has_extended_api(self) -> bool:
        """Return what the store below says."""
        return bool(self._below.has_extended_api())

    def clone(self) -> PrefixStore:
        """Return another store over the same keys, with a timeout of its own."""
        return PrefixStore(as_name(self._prefix[:-1]), self._below.clone())

    def _set(self, key: bytes, value: bytes) -> None:
        self._below.set(self._full(key), value)

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        self._await((key,), deadline)
        value: bytes = self._below.get(self._full(key))
        return value

    def _add(self, key: bytes, amount: int) -> int:
        return int(self._below.add(self._full(key), amount))

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
        self._look_often(keys, deadline)
        self._below.wait(self._full_all(keys), _left(deadline))

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        self._await(keys, deadline)
        return list(self._below.multi_get(self._full_all(keys)))

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        self._below.multi_set(self._full_all(keys), list(values))

    def _push(self, key: bytes, value: bytes) -> None:
        self._below.queue_push(self._full(key), value)

    def _pop(self, key: bytes, deadline: Deadline | None) -> bytes:
        if deadline is not None and not self._below_keeps(deadline):
            self._wait((key,), deadline)
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
        """Wait a little for keys whose store looks only every 10 ms: ranks that meet do so several times."""
        if isinstance(self._below, Store) or not isinstance(self._underlying_non_prefix_store, FileStore):
            return
        names = self._full_all(keys)
        for _ in deadline.soon(_OFTEN_S).tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
            if self._below.check(names):
                return

    def _full(self, key: bytes) -> str:
        return as_name(self._prefix + key)

    def _full_all(self, keys: Sequence[bytes]) -> list[str]:
        return list(map(self._full, keys))

    def _below_keeps(self, deadline: Deadline) -> bool:
        """Whether the store below would wait as long by itself."""
        below: timedelta = self._below.timeout
        return below.total_seconds() == deadline.timeout_s


def _left(deadline: Deadline) -> timedelta:
    """Return what is left as a limit for the store below; zero would mean none to some stores."""
    left_s = deadline.remaining_s()
    return _LONGEST if left_s is None else max(timedelta(seconds=left_s), _SHORTEST)
