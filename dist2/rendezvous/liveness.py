"""Which processes the ranks are, which of them have ended, and how a rank hears of that while it waits.

Each rank writes a `Process` into the store: host, PID namespace, PID and start time, which together name one
process for good. A `LivenessMonitor` reads these and finds those of its own host that have ended; nobody can
tell that of processes on other hosts. A `FailureWatch` is the part of a store in which one group is built:
each wait in it also looks for failures that other ranks have reported and for dead processes, and publishes
what it finds, so that all ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
from torch.distributed import Store

from dist2.errors import PeerLostError, StoreConnectionError, StoreTimeoutError
from dist2.runtime.deadline import Deadline
from dist2.store.base import Store as OurStore
from dist2.store.base import wait_timed_out
from dist2.store.prefix import PrefixStore

_BOOT_ID, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_READS = 16
"""How many keys of ranks that have not come are read at a time: thousands would keep the store busy."""
FAILED = "dist2/failed"
"""The key that says why a group cannot be built."""
_LOOK_S = 0.2
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0003, 0.05
_WORDS = 1000


@attrs.frozen
class Process:
    """A process, told apart from one that has its number later.

    Attributes:
        host: Name of its host.
        space: Equal where numbers of processes mean the same: of the host's boot and the namespace.
        pid: Its number there.
        started: When it was started, in ticks of the host's clock.
    """

    host: str
    space: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Process:
        """Return this process."""
        return cls(socket.gethostname(), _space(), os.getpid(), _started(os.getpid()))

    @classmethod
    def read(cls, text: str) -> Process | None:
        """Return what `text` has told; None if it is something else."""
        parts = text.rsplit("/", 3)
        if len(parts) != 4 or not all(_is_number(part) for part in parts[2:]):
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    @property
    def text(self) -> str:
        """All of it in one line, for `read`."""
        return f"{self.host}/{self.space}/{self.pid}/{self.started}"

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host[:80]}"

    @property
    def is_another_here(self) -> bool:
        """Whether it is another process of this host, and runs."""
        return self._is_here and self.pid != os.getpid() and self._runs

    @property
    def has_ended(self) -> bool:
        """Whether it was one of this host and runs no more: of other hosts, nobody can tell."""
        return self._is_here and self.started > 0 and not self._runs and not _is_hidden(self.pid)

    @property
    def _is_here(self) -> bool:
        return self.host == socket.gethostname() and self.space == _space()

    @property
    def _runs(self) -> bool:
        return self.started > 0 and _started(self.pid) == self.started


def _started(pid: int) -> int:
    """Return when a process of this host was started; 0 if there is none, or one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()  # a name may have anything in it
    return 0 if fields[0] in "ZX" else int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether there is a process of another user, of which the kernel may tell this one nothing."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not Path(f"/proc/{pid}").exists()
    except OSError:
        return False
    return False


@cache
def _space() -> str:
    try:
        parts = [_BOOT_ID.read_text(), str(_NAMESPACE.readlink())]
    except OSError:
        return "unknown"
    return hashlib.blake2b("".join(parts).encode(), digest_size=4).hexdigest()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


class LivenessMonitor:
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


class FailureWatch(PrefixStore):
    """A part of a store in which one group is built, in a `with` block of each of its ranks.

    What a rank raises in the block is told to the others. While a rank waits for keys it looks now and then
    whether such a thing was told, and whether a process of its host that came has ended, which it tells.
    After the block, this is a part of a store like any other.

    Args:
        prefix: What its keys begin with.
        store: Any store.
        rank: The caller's.
        world_size: How many ranks the group has.
        name: The group's, if it has one.
        roll: Who the ranks are, if they have met before; else each says so here when it comes.
    """

    def __init__(
        self,
        prefix: str,
        store: Store,
        rank: int,
        world_size: int,
        name: str | None = None,
        roll: LivenessMonitor | None = None,
    ) -> None:
        super().__init__(prefix, store)
        self._rank = rank
        self._name = name
        what = f"the group of {world_size} ranks" if name is None else f"group {name!r}"
        self._cannot = f"{what} cannot be built: "
        self._over = False
        parts = PrefixStore(prefix, store)
        self._roll = roll or LivenessMonitor(parts, rank, world_size, presence_key)
        self._parts = parts
        parts.set(presence_key(rank), Process.here().text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if isinstance(error, StoreConnectionError):
            raise StoreConnectionError(f"{self._cannot}{error}") from error
        if isinstance(error, PeerLostError) and error.ranks:  # the backend may have seen it first
            self._tell(error.ranks[0], str(error).removeprefix(self._cannot)[:_WORDS])
        elif error is not None:
            words = f"rank {self._rank} gave up ({type(error).__name__}: {error}"
            self._tell(self._rank, words[:_WORDS] + ")")

    def _tell(self, rank: int, words: str) -> None:
        """Tell all that a rank is why the group cannot be built, unless there was a reason before."""
        with suppress(RuntimeError):  # the store may be what failed
            if self._parts.add(f"{FAILED}/count", 1) == 1:
                self._parts.set(FAILED, f"{rank} {words}")

    def _look(self, keys: tuple[bytes, ...]) -> None:
        """Raise if a rank has failed or died, and has not set these keys before that.

        Raises:
            PeerLostError: It has; the message says why.
        """
        found = self._roll.dead()
        if self._parts.check([FAILED]):  # who died may have told why
            said = self._parts.get(FAILED).decode(errors="replace")
            number, _, words = said[: 2 * _WORDS].partition(" ")
            found = (int(number) if number.isdecimal() else -1, words)
        if found is None or self._check(keys):
            return
        rank, words = found
        self._tell(rank, words)
        raise PeerLostError(
            f"{self._cannot}{words}",
            ranks=[rank] if rank >= 0 else [],
            group=self._name or "",
            op="new_group",
            rank=self._rank,
        )

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        while not self._over:
            if self._comes(keys, deadline.soon(_LOOK_S)):
                return
            self._look(keys)
            if deadline.passed:
                raise wait_timed_out(keys, deadline)
        super()._wait(keys, deadline)

    def _comes(self, keys: tuple[bytes, ...], deadline: Deadline) -> bool:
        """Whether keys are set before a deadline.

        torch's TCPStore complains on stderr of each wait that ends without, so that others are asked again
        and again.
        """
        if isinstance(self._underlying_non_prefix_store, OurStore):
            try:
                super()._wait(keys, deadline)
            except StoreTimeoutError:
                return False
            return True
        return any(self._check(keys) for _ in deadline.tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S))

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        if not self._over:
            self._wait((key,), deadline)
        return super()._get(key, deadline)

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        if not self._over:
            self._wait(keys, deadline)
        return super()._multi_get(keys, deadline)


def presence_key(rank: int) -> str:
    """Return the key where a rank says which process it is."""
    return f"dist2/came/{rank}"
