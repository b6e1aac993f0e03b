"""`Roll`: who of those that come to a store has died, as far as this host can tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.distributed import Store

from dist2.store.process import Process

_READS = 16
"""How many keys of those that have not come are looked at in a time: thousands would keep the store busy."""


class Roll:
    """The processes of ranks, read as they come. Look at it now and then while waiting for them.

    Args:
        store: Where each rank says which process it is.
        keys: Under which key, by rank; the first ones are looked at first.
        read: Returns the process from what stands there; None if it is something else.
    """

    def __init__(
        self, store: Store, keys: Mapping[int, str], read: Callable[[str], Process | None] = Process.read
    ) -> None:
        self._store = store
        self._keys = keys
        self._read = read
        self._unread = dict.fromkeys(keys)
        self._processes: dict[int, Process] = {}

    def dead(self) -> tuple[int, str] | None:
        """Return a rank that has died, and that in words; None if none is known to have."""
        for rank in tuple(self._unread)[:_READS]:
            self._unread.pop(rank, None)
            if self._store.check([self._keys[rank]]):
                process = self._read(self._store.get(self._keys[rank]).decode(errors="replace"))
                if process is not None:
                    self._processes[rank] = process
            else:
                self._unread[rank] = None  # after those that were not looked at
        for rank, process in tuple(self._processes.items()):
            if process.has_ended:
                return rank, f"rank {rank} ({process}) died"
        return None
