"""Other processes: which one it is, whether it has ended, and how.

A `Process` is host, PID namespace, PID and start time, which together name one process for good. A process of
this host is watched by its *pidfd*, a descriptor that is readable once the process has ended. Of processes on
other hosts this is unknown.

How a process ended is known to its parent; to others the kernel tells it by the pidfd since Linux 6.15, and
before that only until the parent has asked for it (the process is a *zombie* that long).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import select
import signal
import socket
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path

import attrs

from dist2.runtime.rank_names import host_and_pid

_BOOT_ID, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_GET_INFO = 0xC040FF0B
"""The request ``PIDFD_GET_INFO`` of `ioctl`, with a structure of 64 bytes."""
_INFO = struct.Struct("=Q52xi")
"""That structure: a mask of the fields; at its end the exit status."""
_INFO_EXIT = 1 << 3
_TRIES = 3
_EXIT_CODE = -1
"""Where the exit status stands in ``/proc/PID/stat``."""


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
        return cls(socket.gethostname(), _space(), os.getpid(), _started(os.getpid()) or 0)

    @classmethod
    def read(cls, text: str) -> Process | None:
        """Return the process of a text; None if it is none."""
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
    def place(self) -> str:
        """Its host and number, for the name of its rank."""
        return host_and_pid(self.host, self.pid)

    def watch(self) -> int:
        """Return a descriptor of it, if it is another process of this host that runs; else -1."""
        if not self.is_another_here:
            return -1
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return -1
        if self._runs:  # still: the number is not another process's
            return pidfd
        os.close(pidfd)
        return -1

    @property
    def is_another_here(self) -> bool:
        """Whether it is another process of this host, and runs."""
        return self._is_here and self.pid != os.getpid() and self._runs

    @property
    def has_ended(self) -> bool:
        """Whether it was a process of this host and has ended; False where that is not known."""
        if not self._is_here or self.started == 0:
            return False
        return _started(self.pid) not in (self.started, None) and not _is_hidden(self.pid)

    @property
    def _is_here(self) -> bool:
        return self.host == socket.gethostname() and self.space == _space()

    @property
    def _runs(self) -> bool:
        return self.started > 0 and _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    """Return when a process of this host was started; 0 if there is none, or one that has ended.

    None if this process cannot know: it may have no free descriptor.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return None
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


def _space() -> str:
    try:
        return _known_space()
    except OSError:  # perhaps for a moment: it has no free descriptor
        return "unknown"


@cache
def _known_space() -> str:
    parts = [_BOOT_ID.read_text(), str(_NAMESPACE.readlink())]
    return hashlib.blake2b("".join(parts).encode(), digest_size=4).hexdigest()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def has_ended(pidfd: int) -> bool:
    """Return whether a process has ended.

    Args:
        pidfd: Its descriptor; -1: it is this very process.
    """
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def how_ended(pidfd: int) -> str:
    """Return how a process ended, for a message: ``exited with code 3``, ``was killed by SIGKILL``.

    If the status is unknown, it is ``died``.

    Args:
        pidfd: Its descriptor; -1: not known.
    """
    status = _exit_status(pidfd) if pidfd >= 0 else None
    if status is None:
        return "died"
    if os.WIFSIGNALED(status):
        return was_killed_by(os.WTERMSIG(status))
    return f"exited with code {os.WEXITSTATUS(status)}"


def was_killed_by(number: int) -> str:
    """Return by which signal a process of this host ended, and whether the kernel may have sent it.

    The kernel's count is of all processes of the host, in containers too.
    """
    words = f"was killed by signal {number}"
    with suppress(ValueError):  # a real-time signal has no name
        words = f"was killed by {signal.Signals(number).name}"
    kills = _memory_kills() - _kills_before
    if number != signal.SIGKILL or kills <= 0:
        return words
    many = "a process" if kills == 1 else f"{kills} processes"
    return f"{words} (the kernel killed {many} of this host for lack of memory since this one began)"


def _memory_kills() -> int:
    """Return how many processes of the host the kernel has killed as memory ran out; 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


_kills_before = _memory_kills()


def _exit_status(pidfd: int) -> int | None:
    """Return the status of a process that has ended, as ``os.waitpid`` does; None if it is not known."""
    for _ in range(_TRIES):  # its parent may ask for it between the two
        status = _status_of_reaped(pidfd)
        if status is None:
            status = _status_of_zombie(pidfd)
        if status is not None:
            return status
    return None


def _status_of_reaped(pidfd: int) -> int | None:
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # an older kernel
        return None
    told, status = _INFO.unpack(info)
    return int(status) if told & _INFO_EXIT else None


def _status_of_zombie(pidfd: int) -> int | None:
    try:
        shown = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        pid = int(shown.partition("\nPid:")[2].split()[0])
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError, IndexError):
        return None
    return int(stat[_EXIT_CODE]) if stat[0] == "Z" else None
