"""Use of the machine by other processes, which disturbs measurements on a shared machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import attrs

_STAT = Path("/proc/stat")
_MEMORY = Path("/proc/meminfo")


@attrs.frozen
class Patience:
    """When to measure again.

    Attributes:
        foreign_cores: A measurement counts as disturbed if others keep more cores than this busy.
        retries: Repetitions of a disturbed measurement; then the least disturbed one counts.
        pause_s: Pause before each, in seconds.
    """

    foreign_cores: float = float("inf")
    retries: int = 0
    pause_s: float = 2.0


class Neighbours:
    """Tells how many cores other processes keep busy.

    Args:
        own_s: Returns the processor seconds that the measured processes and their coordinator have used.
    """

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s
        self._start = time.monotonic()
        self._foreign_s = self._read()

    def cores(self) -> float:
        """Return how many, on average since the start."""
        return max(0.0, (self._read() - self._foreign_s) / (time.monotonic() - self._start))

    def _read(self) -> float:
        return _busy_s() - self._own_s()


def _busy_s() -> float:
    """Return the seconds that all cores were busy since the machine started; 0 where it does not say."""
    if not _STAT.exists():
        return 0.0
    fields = [int(field) for field in _STAT.read_text().partition("\n")[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, *_ = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def free_memory() -> int | None:
    """Return the bytes that processes could still have; None where the system does not say."""
    if not _MEMORY.exists():
        return None
    values = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    return int(values["MemAvailable"].split()[0]) << 10 if "MemAvailable" in values else None
