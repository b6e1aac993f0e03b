"""`Process`: which process a rank is, in words that others find in a store."""

from __future__ import annotations

import hashlib
import os
import socket
from functools import cache
from pathlib import Path

import attrs

_BOOT_ID, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


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
