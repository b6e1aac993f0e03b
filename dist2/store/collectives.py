"""Collectives over nothing but a store: slow, and working as soon as ranks share one.

For what happens before there are links between ranks, and after they broke. Names, arguments and keys are
those of torch 2.13's ``_StoreCollectives``, so that ranks with torch's and with ours may meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import Store as TorchStore

from dist2.errors import InvalidUsageError, StoreTimeoutError
from dist2.runtime.arguments import as_int, check_store, check_world_size
from dist2.runtime.deadline import Deadline
from dist2.store.base import DEFAULT_TIMEOUT
from dist2.store.text import Text, as_key, as_name, as_value

_SHORTEST = timedelta(milliseconds=1)
_LONGEST = timedelta(days=24)


class StoreCollectives:
    """Collectives of some ranks over a store.

    Each call takes a key that was not used before on this object, and the same on all ranks.

    Args:
        store: Any store, dist2's or torch's.
        rank: The caller's rank.
        world_size: How many ranks take part.

    Raises:
        InvalidUsageError: ``rank`` is not below ``world_size``, or ``store`` is no store.
    """

    def __init__(self, store: TorchStore, rank: int, world_size: int) -> None:
        check_store(store)
        self._store: Any = store  # torch's stub file lacks some of what its stores have
        self._world_size = check_world_size(world_size)
        number = as_int(rank)
        if number is None or not 0 <= number < self._world_size:
            raise InvalidUsageError(f"rank must be an int from 0 to {self._world_size - 1}, got {rank!r}")
        self._rank = number
        self._used: set[str] = set()

    def barrier(self, key: str, timeout: timedelta | float = DEFAULT_TIMEOUT, block: bool = True) -> None:
        """Wait until all ranks have come.

        Args:
            key: New to this object.
            timeout: Limit: a `timedelta` or seconds; zero means none.
            block: Whether to wait; otherwise only tell the others that one came.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.
        """
        self._barrier(self._use(key), Deadline.after(timeout), block)

    def broadcast_send(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        """Give data to all ranks that call `broadcast_recv`."""
        Deadline.after(timeout)  # checks it: setting does not wait
        self._store.set(self._use(key), as_value(data))

    def broadcast_recv(self, key: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> bytes:
        """Return what `broadcast_send` gave.

        Raises:
            StoreTimeoutError: The sender is missing.
        """
        name = self._use(key)
        return self._fetch("broadcast", [name], Deadline.after(timeout), "the sender")[0]

    def gather_send(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        """Give data to the rank that calls `gather_recv`."""
        Deadline.after(timeout)
        self._store.set(f"{self._use(key)}/{self._rank}", as_value(data))

    def gather_recv(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> list[bytes]:
        """Return what all ranks gave, in rank order, with one's own ``data`` in its place.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.
        """
        name = self._use(key)
        own = as_value(data)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        given = self._fetch_ranks("gather", name, others, Deadline.after(timeout))
        given.insert(self._rank, own)
        return given

    def scatter_send(
        self, key: str, data: Sequence[Text], timeout: timedelta | float = DEFAULT_TIMEOUT
    ) -> bytes:
        """Give each rank its item of ``data``, and return one's own.

        Raises:
            InvalidUsageError: There is not one item for each rank.
        """
        Deadline.after(timeout)
        if len(data) != self._world_size:
            raise InvalidUsageError(
                f"data must have one item for each of {self._world_size} ranks, got {len(data)}"
            )
        items = list(map(as_value, data))
        name = self._use(key)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._store.multi_set([f"{name}/{rank}" for rank in others], [items[rank] for rank in others])
        return items[self._rank]

    def scatter_recv(self, key: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> bytes:
        """Return one's own item of what `scatter_send` gave.

        Raises:
            StoreTimeoutError: The sender is missing.
        """
        name = f"{self._use(key)}/{self._rank}"
        return self._fetch("scatter", [name], Deadline.after(timeout), "the sender")[0]

    def all_gather(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> list[bytes]:
        """Return what all ranks gave, in rank order.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.
        """
        deadline = Deadline.after(timeout)
        name = self._use(key)
        self._store.set(f"{name}/{self._rank}", as_value(data))
        return self._fetch_ranks("all_gather", name, range(self._world_size), deadline)

    def all_sum(self, key: str, data: int, timeout: timedelta | float = DEFAULT_TIMEOUT) -> int:
        """Return the sum of all ranks' integers.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.
        """
        deadline = Deadline.after(timeout)
        name = self._use(key)
        self._store.add(name, data)
        self._barrier(f"{name}/barrier", deadline, True)
        return int(self._store.add(name, 0))

    def _use(self, key: str) -> str:
        name = as_name(as_key(key))
        if name in self._used:
            raise InvalidUsageError(f"Key {name} has already been used")
        self._used.add(name)
        return name

    def _barrier(self, name: str, deadline: Deadline, block: bool) -> None:
        came = self._store.add(f"{name}/num_members", 1)
        self._store.set(f"{name}/{self._rank}", b"joined")
        if came == self._world_size:
            self._store.set(f"{name}/last_members", b"<val_ignored>")
        elif block:
            ranks = range(self._world_size)
            with self._naming_missing("barrier", [f"{name}/{rank}" for rank in ranks], ranks, deadline):
                self._store.wait([f"{name}/last_members"], _left(deadline))

    def _fetch_ranks(self, what: str, name: str, ranks: Sequence[int], deadline: Deadline) -> list[bytes]:
        names = [f"{name}/{rank}" for rank in ranks]
        with self._naming_missing(what, names, ranks, deadline):
            self._store.wait(names, _left(deadline))
        return list(self._store.multi_get(names))

    def _fetch(self, what: str, names: list[str], deadline: Deadline, sender: str) -> list[bytes]:
        with self._naming_missing(what, names, [sender], deadline):
            self._store.wait(names, _left(deadline))
        return list(self._store.multi_get(names))

    @contextmanager
    def _naming_missing(
        self, what: str, names: Sequence[str], ranks: Sequence[object], deadline: Deadline
    ) -> Iterator[None]:
        """Turn a timeout into one that names the ranks whose keys are missing."""
        try:
            yield
        except RuntimeError as error:  # torch's stores have no type for it
            if not deadline.passed:
                raise
            missing = [rank for rank, name in zip(ranks, names, strict=True) if not self._store.check([name])]
            raise StoreTimeoutError(
                f"{what} failed -- timeout after {deadline.milliseconds}ms, "
                f"missing ranks: {', '.join(map(str, missing))}"
            ) from error


def _left(deadline: Deadline) -> timedelta:
    """Return what is left as a store takes it; zero would mean no limit to some."""
    left_s = deadline.remaining_s()
    return _LONGEST if left_s is None else max(timedelta(seconds=left_s), _SHORTEST)
