"""`Roll`: who of those that come to a store has died, as far as this host can tell."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store

from dist2.store.process import Process

_READS = 16
"""How many keys of those that have not come are looked at in a time: thousands would keep the store busy."""


class Roll:
    """The processes of ranks, read as they come. Look at it now and then while waiting for them.

    Args:
        store: Where each rank says which process it is.
        rank: The caller's.
        world_size: How many ranks there are.
        key: Returns where a rank says it.
        read: Returns the process from what stands there; None if it is something else.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        key: Callable[[int], str],
        read: Callable[[str], Process | None] = Process.read,
    ) -> None:
        self._store = store
        self._key = key
        self._read = read
        # Each begins with the next rank: together they soon have looked at all.
        self._unread = dict.fromkeys((rank + step) % world_size for step in range(1, world_size))
        self._processes: dict[int, Process] = {}

    def dead(self) -> tuple[int, str] | None:
        """Return a rank that has died, and that in words; None if none is known to have."""
        for rank in tuple(self._unread)[:_READS]:
            self._unread.pop(rank, None)
            key = self._key(rank)
            if self._store.check([key]):
                process = self._read(self._store.get(key).decode(errors="replace"))
                if process is not None:
                    self._processes[rank] = process
            else:
                self._unread[rank] = None  # after those that were not looked at
        for rank, process in tuple(self._processes.items()):
            if process.has_ended:
                return rank, died(rank, process)
        return None


def died(rank: int, process: Process) -> str:
    """Say that a rank has died."""
    return f"rank {rank} ({process}) died"
