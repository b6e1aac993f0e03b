"""Doorbells: waking a process that sleeps instead of polling shared memory.

A pipe whose write end peers open through ``/proc/<pid>/fd/<fd>``: it has no name, and only processes
of the same user can open it.
"""

from __future__ import annotations

import contextlib
import os

import attrs

from dist2.operation.engine import Bell
from dist2.runtime.resources import system_call
from dist2.runtime.shared_memory import INSTEAD, open_of


@attrs.frozen
class DoorbellLocator:
    """The address of a doorbell, for peers."""

    pid: int
    fd: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.fd}"

    @classmethod
    def parse(cls, text: str) -> DoorbellLocator:
        pid, fd = text.split(":")
        return cls(int(pid), int(fd))


class Doorbell:
    """This process's doorbell: the end that sleeps.

    Attributes:
        locator: For peers.
        bell: Counts the threads that sleep on it.
    """

    def __init__(self) -> None:
        with system_call("pipe2", INSTEAD):
            self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.locator = DoorbellLocator(os.getpid(), self._write_fd)
        self.bell = Bell(self._read_fd)

    def fileno(self) -> int:
        """Return the descriptor that is readable after a ring."""
        return self._read_fd

    def ring(self) -> None:
        """Wake the sleepers of this process."""
        _write(self._write_fd)

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read_fd)
        os.close(self._write_fd)


class PeerDoorbell:
    """A peer's doorbell: the end that rings."""

    def __init__(self, locator: DoorbellLocator) -> None:
        self._fd = open_of(locator.pid, locator.fd, os.O_WRONLY | os.O_NONBLOCK, "doorbell")

    def fileno(self) -> int:
        """Return the descriptor to ring by: one byte is a ring."""
        return self._fd

    def ring(self) -> None:
        """Wake the sleepers of the peer; nothing happens if it is gone."""
        _write(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _write(fd: int) -> None:
    # Full: it is about to wake anyway. Broken: it is dead, and its watchers report that.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(fd, b"!")
