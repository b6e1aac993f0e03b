"""Monotonic deadlines: computed once, handed down as an absolute number of nanoseconds."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real
from time import monotonic_ns

from dist2.errors import InvalidUsageError

__all__ = ["FOREVER_NS", "PAST_NS", "deadline_in", "monotonic_ns", "remaining_s", "seconds"]

FOREVER_NS = 1 << 62
"""A deadline that never comes (146 years of uptime)."""

PAST_NS = 0
"""A deadline that has passed: for who does not wait at all."""

_LONGEST_S = 1e9
"""Longer limits (32 years; infinity among them) are this one, so that nanoseconds stay integers."""


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
