"""The one notion of a limit in time: monotonic deadlines, computed once and handed down.

The clock goes on while a process is stopped (Ctrl-Z, a job that its scheduler suspends). Ranks that were
stopped together must not find their time up when they are continued: see `extended`.

Hot paths hand down the absolute monotonic nanosecond (`deadline_in`, `remaining_s`). Where the limit itself
is needed later, for messages or for a last step that may take a little longer, a `Deadline` carries both.
The timeout of a group must be positive (`seconds`); that of a store may be zero, which means no limit
(`checked_timeout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from numbers import Real
from time import monotonic_ns, sleep

import attrs

from dist2.errors import ArgumentTypeError, InvalidUsageError

__all__ = [
    "FOREVER_NS",
    "PAST_NS",
    "Deadline",
    "checked_timeout",
    "deadline_in",
    "extended",
    "monotonic_ns",
    "note_wait",
    "remaining_s",
    "seconds",
]

FOREVER_NS = 1 << 62
"""A deadline that never passes (146 years of uptime)."""

PAST_NS = 0
"""A deadline that has passed: for calls that must not wait."""

_LONGEST_S = 1e9
"""Longer limits (32 years; infinity among them) are this one, so that nanoseconds stay integers."""

_GRACE_SHARE, _GRACE_LEAST_S, _GRACE_MOST_S = 0.08, 0.01, 1.0
"""Timeouts are accurate to a tenth; `Deadline.stretched` uses this much of that."""


def seconds(timeout: timedelta | float | int, argument: str = "timeout") -> float:
    """Return a duration in seconds.

    Raises:
        InvalidUsageError: It is not a `timedelta` or number, or not positive.
    """
    if isinstance(timeout, timedelta):
        value = timeout.total_seconds()
    elif isinstance(timeout, (int, float, Real)) and not isinstance(timeout, bool):  # numpy's numbers as well
        value = float(timeout)
    else:
        raise InvalidUsageError(
            f"{argument} must be a timedelta or a number of seconds, "
            f"got {timeout!r} ({type(timeout).__name__})"
        )
    if not value > 0:
        raise InvalidUsageError(f"{argument} must be positive, got {timeout!r}")
    return min(value, _LONGEST_S)


def deadline_in(timeout_s: float) -> int:
    """Return the monotonic nanosecond at which ``timeout_s`` from now has passed."""
    return min(monotonic_ns() + int(min(timeout_s, _LONGEST_S) * 1e9), FOREVER_NS)


def remaining_s(deadline_ns: int) -> float:
    """Return the seconds left until a deadline, never negative."""
    return max(0, deadline_ns - monotonic_ns()) / 1e9


_STOPPED_NS = 1_000_000_000
"""A wait that ends so much too late was not only kept waiting for a core."""
_stop = (0, 0)
"""When this process was stopped last, and when it was continued."""


def note_wait(began_ns: int, until_ns: int) -> None:
    """Take in the end of a wait: one that ends far too late has been stopped, and with it this process."""
    global _stop
    now_ns = monotonic_ns()
    if now_ns - max(began_ns, until_ns) > _STOPPED_NS:
        _stop = began_ns, now_ns


def extended(deadline_ns: int) -> int:
    """Return a deadline, later by the time of the last stop of this process if it passed meanwhile."""
    began_ns, ended_ns = _stop
    return deadline_ns + ended_ns - began_ns if began_ns <= deadline_ns < ended_ns else deadline_ns


def checked_timeout(timeout: timedelta | float, argument: str = "timeout") -> timedelta:
    """Return a limit as torch writes it: zero means none.

    Raises:
        InvalidUsageError: It is negative, no number, or neither a `timedelta` nor a number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float, Real)):
        raise ArgumentTypeError(
            f"{argument} must be a timedelta or seconds, got {timeout!r} ({type(timeout).__name__})"
        )
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value >= 0:  # not a number is neither
        raise InvalidUsageError(f"{argument} must not be negative, got {timeout!r}")
    return timedelta(seconds=min(value, _LONGEST_S))


@attrs.frozen
class Deadline:
    """A limit that started to run.

    Attributes:
        ns: The monotonic nanosecond at which it will have passed.
        timeout_s: The timeout as given, in seconds; zero where there is no limit.
    """

    ns: int
    timeout_s: float

    @classmethod
    def after(cls, timeout: timedelta | float) -> Deadline:
        """Start a limit now.

        Raises:
            InvalidUsageError: It is negative, or of another type.
        """
        timeout_s = checked_timeout(timeout).total_seconds()
        return cls(deadline_in(timeout_s) if timeout_s else FOREVER_NS, timeout_s)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return monotonic_ns() >= self.ns

    @property
    def milliseconds(self) -> int:
        """The limit that was given, in milliseconds."""
        return round(self.timeout_s * 1000)

    def remaining_s(self) -> float | None:
        """Return the seconds left, or None without a limit; for `socket.settimeout` and the like."""
        return None if self.ns == FOREVER_NS else remaining_s(self.ns)

    def pause(self, seconds: float) -> None:
        """Sleep for so long, but not beyond it."""
        sleep(min(remaining_s(self.ns), seconds))

    def tries(self, shortest_s: float, longest_s: float) -> Iterator[None]:
        """Yield at once, and after pauses that grow; the last time when it has passed.

        For polling state that changes without notice: test it in each round, and return once it holds.

        Args:
            shortest_s: The first pause; each is half as long again as the one before,
            longest_s: but not longer than this.
        """
        pause_s = shortest_s
        while True:
            over = self.passed
            yield
            if over:
                return
            self.pause(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)

    def stretched(self) -> Deadline:
        """Return a deadline a little later, for the last step of something that was only just in time."""
        grace_s = min(max(_GRACE_SHARE * self.timeout_s, _GRACE_LEAST_S), _GRACE_MOST_S)
        return Deadline(max(self.ns, deadline_in(grace_s)), self.timeout_s)

    def soon(self, seconds: float) -> Deadline:
        """Return this deadline, or an earlier one: in so many seconds."""
        return Deadline(min(self.ns, deadline_in(seconds)), self.timeout_s)
