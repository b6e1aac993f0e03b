"""`Alarm`: wakes a thread that sleeps in an epoll."""

from __future__ import annotations

import os
import select
from contextlib import suppress

from dist2.runtime.resources import system_call


class Alarm:
    """A descriptor in an epoll that can be made readable.

    Args:
        epoll: A thread sleeps in it.
    """

    def __init__(self, epoll: select.epoll) -> None:
        with system_call("eventfd2"):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        epoll.register(self._fd, select.EPOLLIN)

    def ring(self) -> None:
        """Wake the thread that sleeps, or the next one that would. Safe in signal handlers."""
        fd = self._fd  # another thread may close it meanwhile
        if fd >= 0:
            with suppress(OSError):
                os.eventfd_write(fd, 1)

    def answers(self, fd: int) -> bool:
        """Whether a descriptor is this one's; it is silent then."""
        if fd != self._fd:
            return False
        with suppress(BlockingIOError):
            os.eventfd_read(fd)
        return True

    def close(self) -> None:
        # Forgotten first: another thread must not write to the next file that gets this descriptor.
        fd, self._fd = self._fd, -1
        os.close(fd)
