"""Clocks of other processes: how far their monotonic clock is from ours, and how well that is known.

Two processes of one kernel and one time namespace read the same monotonic clock: their offset is 0,
exactly. Elsewhere it is estimated from requests, as Cristian's algorithm and NTP do: the other side read
its clock at some moment between our sending (s) and our receiving (r), so that the middle, (s + r) / 2, is
wrong by at most (r - s) / 2, however the network behaves. Of all samples the one with the least error counts.
Clocks of different hosts drift apart, so a sample's error grows with its age.

Source: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989); RFC 5905,
section 8.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import attrs

DRIFT = 100e-6
"""By how much two hosts' clocks may drift apart, in seconds a second: crystals are good for 50 ppm each."""

SAMPLES = 16
"""How many samples are kept."""


@cache
def clock_id() -> str:
    """Return the id of the monotonic clock, equal in processes that read the same one; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/time").readlink().name
    except OSError:
        return ""
    return f"{boot} {namespace}"


@attrs.frozen
class Offset:
    """How to read another process's monotonic clock.

    Attributes:
        offset_ns: Nanoseconds to add to its time to get ours.
        error_ns: By how much that may be wrong.
    """

    offset_ns: int = 0
    error_ns: int = 0


@attrs.frozen
class _Sample:
    offset_ns: int
    error_ns: int
    taken_ns: int


class ClockOffset:
    """The offset of one other process, from samples."""

    def __init__(self) -> None:
        self._shared = False
        self._samples: list[_Sample] = []

    def add(self, sent_ns: int, there_ns: int, received_ns: int, its_clock: str = "") -> None:
        """Add a sample: the time of our request, the time of its clock, the time of its answer.

        Args:
            sent_ns: Our monotonic clock before the request.
            there_ns: Its monotonic clock.
            received_ns: Our monotonic clock after the answer.
            its_clock: Its `clock_id`.
        """
        middle_ns = (sent_ns + received_ns) // 2
        self.note(middle_ns - there_ns, (received_ns - sent_ns + 1) // 2, received_ns, its_clock)

    def note(self, offset_ns: int, error_ns: int, taken_ns: int, its_clock: str = "") -> None:
        """Add a sample: an offset as it was at a moment of our clock, and by how much it may be wrong."""
        self._shared = its_clock != "" and its_clock == clock_id()
        self._samples.append(_Sample(offset_ns, error_ns, taken_ns))
        del self._samples[:-SAMPLES]

    def at(self, now_ns: int) -> Offset | None:
        """Return the offset as it is known at a moment of our clock; None without a sample."""
        if not self._samples:
            return None
        if self._shared:
            return Offset()

        def error_ns(sample: _Sample) -> int:
            return sample.error_ns + int(DRIFT * max(0, now_ns - sample.taken_ns))

        best = min(self._samples, key=error_ns)
        return Offset(best.offset_ns, error_ns(best))
