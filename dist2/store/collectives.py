"""Collectives over nothing but a store: slow, and working as soon as ranks share one.

They work before there are links between ranks, and after these broke. Names, arguments and keys are
those of torch 2.13's ``_StoreCollectives``, so that ranks with torch's and with ours interoperate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store as TorchStore

from dist2.errors import InvalidUsageError, StoreTimeoutError
from dist2.runtime.arguments import check_rank, check_store, check_world_size
from dist2.runtime.deadline import Deadline
from dist2.store.base import DEFAULT_TIMEOUT
from dist2.store.text import Text, as_key, as_name, as_value
from dist2.store.waiting import arrive


class StoreCollectives:
    """Collectives of some ranks over a store.

    Each call takes a key that was not used before on this object, and the same on all ranks.

    Args:
        store: Any store, dist2's or torch's.
        rank: The caller's rank.
        world_size: How many ranks take part.

    Raises:
        InvalidUsageError: ``rank`` is not below ``world_size``, or ``store`` is no store.

    Examples:
        >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
        >>> meeting.all_gather("hosts", f"host{pg.rank()}")
        [b'host0', b'host1']
    """

    def __init__(self, store: TorchStore, rank: int, world_size: int) -> None:
        check_store(store)
        self._store: Any = store  # torch's stub file lacks some methods of its stores
        self._world_size = check_world_size(world_size)
        self._rank = check_rank(rank, "rank", self._world_size)
        self._used: set[str] = set()

    def barrier(self, key: str, timeout: timedelta | float = DEFAULT_TIMEOUT, block: bool = True) -> None:
        """Wait until all ranks have arrived.

        Args:
            key: New to this object.
            timeout: Limit: a `timedelta` or seconds; zero means none.
            block: Whether to wait; otherwise only register the arrival.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> meeting.barrier("ready", timeout=5)
        """
        self._barrier(self._use(key), Deadline.after(timeout), block)

    def broadcast_send(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        """Give data to all ranks that call `broadcast_recv`.

        Args:
            key: New to this object; the same on all ranks.
            data: Text or bytes.
            timeout: As for the other methods; setting does not wait.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> if pg.rank() == 0:
            ...     meeting.broadcast_send("config", "lr=0.1")
            ... else:
            ...     meeting.broadcast_recv("config")  # b'lr=0.1'
        """
        Deadline.after(timeout)  # checks it: setting does not wait
        self._store.set(self._use(key), as_value(data))

    def broadcast_recv(self, key: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> bytes:
        """Return the data of `broadcast_send`.

        Args:
            key: New to this object; the same on all ranks.
            timeout: Limit: a `timedelta` or seconds; zero means none.

        Raises:
            StoreTimeoutError: The sender is missing.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> if pg.rank() == 0:
            ...     meeting.broadcast_send("config", "lr=0.1")
            ... else:
            ...     meeting.broadcast_recv("config")  # b'lr=0.1'
        """
        name = self._use(key)
        return self._fetch("broadcast", {"the sending rank": name}, Deadline.after(timeout))[0]

    def gather_send(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        """Give data to the rank that calls `gather_recv`.

        Args:
            key: New to this object; the same on all ranks.
            data: The caller's contribution.
            timeout: As for the other methods; setting does not wait.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> if pg.rank() == 1:
            ...     meeting.gather_send("hosts", "b")
            ... else:
            ...     meeting.gather_recv("hosts", "a")  # [b'a', b'b']
        """
        Deadline.after(timeout)
        self._store.set(f"{self._use(key)}/{self._rank}", as_value(data))

    def gather_recv(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> list[bytes]:
        """Return the data of all ranks, in rank order, with the caller's ``data`` at its rank.

        Args:
            key: New to this object; the same on all ranks.
            data: The caller's contribution.
            timeout: Limit: a `timedelta` or seconds; zero means none.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> if pg.rank() == 1:
            ...     meeting.gather_send("hosts", "b")
            ... else:
            ...     meeting.gather_recv("hosts", "a")  # [b'a', b'b']
        """
        name = self._use(key)
        own = as_value(data)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        given = self._fetch("gather", _names(name, others), Deadline.after(timeout))
        given.insert(self._rank, own)
        return given

    def scatter_send(
        self, key: str, data: Sequence[Text], timeout: timedelta | float = DEFAULT_TIMEOUT
    ) -> bytes:
        """Give each rank its item of ``data``, and return one's own.

        Args:
            key: New to this object; the same on all ranks.
            data: One item for each rank.
            timeout: Limit: a `timedelta` or seconds; zero means none.

        Raises:
            InvalidUsageError: There is not one item for each rank.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> if pg.rank() == 0:
            ...     part = meeting.scatter_send("parts", ["a", "b"])
            ... else:
            ...     part = meeting.scatter_recv("parts")
            >>> part == (b"a", b"b")[pg.rank()]
            True
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
        """Return the caller's item of `scatter_send`.

        Args:
            key: New to this object; the same on all ranks.
            timeout: Limit: a `timedelta` or seconds; zero means none.

        Raises:
            StoreTimeoutError: The sender is missing.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> if pg.rank() == 0:
            ...     part = meeting.scatter_send("parts", ["a", "b"])
            ... else:
            ...     part = meeting.scatter_recv("parts")
            >>> part == (b"a", b"b")[pg.rank()]
            True
        """
        name = f"{self._use(key)}/{self._rank}"
        return self._fetch("scatter", {"the sending rank": name}, Deadline.after(timeout))[0]

    def all_gather(self, key: str, data: Text, timeout: timedelta | float = DEFAULT_TIMEOUT) -> list[bytes]:
        """Return the data of all ranks, in rank order.

        Args:
            key: New to this object; the same on all ranks.
            data: The caller's contribution.
            timeout: Limit: a `timedelta` or seconds; zero means none.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> meeting.all_gather("names", f"rank {pg.rank()}")
            [b'rank 0', b'rank 1']
        """
        deadline = Deadline.after(timeout)
        name = self._use(key)
        self._store.set(f"{name}/{self._rank}", as_value(data))
        return self._fetch("all_gather", _names(name, range(self._world_size)), deadline)

    def all_sum(self, key: str, data: int, timeout: timedelta | float = DEFAULT_TIMEOUT) -> int:
        """Return the sum of all ranks' integers.

        Args:
            key: New to this object; the same on all ranks.
            data: A 64-bit integer.
            timeout: Limit: a `timedelta` or seconds; zero means none.

        Raises:
            StoreTimeoutError: Ranks are missing; the message names them.

        Examples:
            >>> meeting = dist2.StoreCollectives(pg.get_group_store(), pg.rank(), pg.size())
            >>> meeting.all_sum("total", 2)
            4
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
            names = _names(name, range(self._world_size))
            self._await("barrier", [f"{name}/last_members"], names, deadline)

    def _fetch(self, what: str, names: Mapping[object, str], deadline: Deadline) -> list[bytes]:
        keys = list(names.values())
        self._await(what, keys, names, deadline)
        return list(self._store.multi_get(keys))

    def _await(self, what: str, keys: Sequence[str], names: Mapping[object, str], deadline: Deadline) -> None:
        """Wait for keys; if they are not set in time, name the missing ranks."""
        if not arrive(self._store, keys, deadline):
            missing = [str(who) for who, name in names.items() if not self._store.check([name])]
            raise StoreTimeoutError(
                f"{what} failed -- timeout after {deadline.milliseconds}ms, "
                f"missing ranks: {', '.join(missing)}"
            )


def _names(name: str, ranks: Sequence[int]) -> dict[object, str]:
    """Return the keys of ranks."""
    return {rank: f"{name}/{rank}" for rank in ranks}
