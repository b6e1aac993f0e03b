"""Where the control planes of a job are: entries in the store of the group that they were started with.

All ranks append to one key, so that one request reads all entries; the last of a rank counts. A few, the
*hubs*, append to a second key as well: in a large job, most ranks need no more than these. With a secret
entries are sealed: a token is never sent to an address that a stranger has written. Where a store cannot
append, each rank has a key. Entries are kept once read, as the store may end before the job's troubles do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import attrs
from torch.distributed import Store

from dist2.errors import AuthenticationError
from dist2.runtime.other_process import Process
from dist2.security.authenticator import Credentials
from dist2.security.sealing import seal, unseal
from dist2.store.prefix import PrefixStore

_PREFIX = "dist2-control-plane"
_ROLL = "roll"
_HUBS = "hubs"
_TOKEN = "token"
_USE = "control plane"
STORE_S = timedelta(seconds=10)


@attrs.frozen
class Entry:
    """A control plane.

    Attributes:
        rank: Of the job.
        url: Where it listens.
        process: Its process.
        after_ns: The monotonic nanosecond, by its clock, up to which the asking rank knows its operations.
    """

    rank: int
    url: str
    process: Process
    after_ns: int = 0


def hubs_of(ranks: Sequence[int]) -> list[int]:
    """Return the ranks to ask for what others have found out: the first, and then ones twice as far each.

    So few ranks are enough though all ranks of some hosts may be silent.
    """
    powers = range(max(0, len(ranks) - 1).bit_length())
    return [*ranks[:1], *(ranks[1 << power] for power in powers)]


class Directory:
    """The entries that this process knows.

    Args:
        store: Shared by the ranks; None for a job of one.
        credentials: Of this process.
        uid: Of the group that the store belongs to.

    Attributes:
        entries: By rank.
    """

    def __init__(self, store: Store | None, credentials: Credentials, uid: str = "") -> None:
        self._store = None if store is None else PrefixStore(_PREFIX, store)
        self._credentials = credentials
        self._uid = uid
        self._lock = threading.Lock()
        self.entries: dict[int, Entry] = {}

    def agreed_token(self, mine: str) -> str:
        """Return one token for all ranks: that of the first rank to register."""
        if self._store is None:
            return mine
        held = self._store.compare_set(_TOKEN, "", seal(self._credentials, mine, _USE, self._uid, _TOKEN))
        return unseal(self._credentials, held.decode(), _USE, self._uid, _TOKEN)

    def publish(self, entry: Entry, is_hub: bool = False) -> None:
        """Enter this rank's control plane."""
        self.entries[entry.rank] = entry
        if self._store is None:
            return
        text = json.dumps({"rank": entry.rank, "url": entry.url, "process": entry.process.text})
        line = seal(self._credentials, text, _USE, self._uid, str(entry.rank))
        if self._store.has_extended_api():
            for roll in (_ROLL, _HUBS) if is_hub else (_ROLL,):
                self._store.append(roll, f"{entry.rank} {line}\n")
        else:
            self._store.set(f"{_ROLL}/{entry.rank}", f"{entry.rank} {line}\n")

    def refresh(
        self, ranks: Iterable[int], only_hubs: bool = False, again: Container[int] = frozenset()
    ) -> None:
        """Read the entries of other ranks. Blocks as long as the store does.

        Args:
            ranks: The other ranks.
            only_hubs: Whether the entries of the hubs are enough.
            again: Ranks whose entry may have changed.
        """
        store = self._store
        if store is None:
            return
        with self._lock:
            for line in self._lines(store, ranks, _HUBS if only_hubs else _ROLL, again):
                entry = self._read(line)
                if entry is not None:
                    self.entries[entry.rank] = entry

    def _lines(
        self, store: PrefixStore, ranks: Iterable[int], roll: str, again: Container[int]
    ) -> Iterable[str]:
        if store.has_extended_api():
            return store.get(roll).decode().splitlines() if store.check([roll]) else ()
        keys = [f"{_ROLL}/{rank}" for rank in ranks if rank not in self.entries or rank in again]
        return [store.get(key).decode().strip() for key in keys if store.check([key])]

    def _read(self, line: str) -> Entry | None:
        """Return an entry; None if no member has written the line."""
        rank, _, sealed = line.partition(" ")
        with suppress(AuthenticationError, ValueError, KeyError, TypeError):
            read: dict[str, Any] = json.loads(unseal(self._credentials, sealed, _USE, self._uid, rank))
            process = Process.read(str(read["process"]))
            if process is not None and str(read["rank"]) == rank and isinstance(read["url"], str):
                return Entry(int(rank), read["url"], process)
        return None

    def close(self) -> None:
        """Let go of the store; the known entries stay."""
        self._store = None  # without the lock: a thread may be inside a store that does not answer
