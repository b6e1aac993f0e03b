"""The last hour of this process: rates, latency percentiles and operations in flight, a point each 5 seconds.

Theory of operation. The thread of the control plane reads the counters every `EVERY_S` and keeps the
difference to the reading before: operations pay nothing. A point has one row for all operations together
and one for each of the first `MAX_OPS` names; other names count in the total only. So the memory is bounded:
`POINTS` points of `MAX_OPS` + 1 rows of 6 doubles each are 1.4 MiB, a job of three operations keeps 0.9 MiB.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dist2.operation.counters import Counters
from observability.exposition import bus_share
from observability.metrics import BYTES, DURATIONS, FAILED, Metrics

EVERY_S = 5.0
POINTS = 720
"""An hour."""

MAX_OPS = 8
ALL = "all"
"""The row of all operations together."""

FIELDS = ("per_s", "bytes_per_s", "bus_bytes_per_s", "failed", "p50_s", "p99_s")
"""Of a row: operations, payload bytes and bytes over the bus a second, failures, percentiles in seconds."""

PERCENTILES = FIELDS[4:]

COUNTED = FAILED + 1
"""Fields of a series that are read: the later ones are no counts."""
BUS_BYTES = COUNTED
"""Place of a further count in a row's change."""


@attrs.frozen
class _Point:
    """The events since the previous point.

    Attributes:
        at_s: Seconds since the epoch.
        in_flight: Number of operations in flight.
        oldest_s: The age of the oldest of them; 0 with none.
        rows: The numbers of `FIELDS`, by operation.
    """

    at_s: float
    in_flight: int
    oldest_s: float
    rows: Mapping[str, array[float]]


class History:
    """The points of the last hour.

    Args:
        metrics: The counters to read.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._points: deque[_Point] = deque(maxlen=POINTS)
        self._names: list[str] = [ALL]
        self._before: Mapping[tuple[str, int], Counters] = metrics.totals()
        self._before_ns = time.monotonic_ns()

    def sample(self) -> None:
        """Add a point; called by one thread only."""
        now_ns, totals = time.monotonic_ns(), self._metrics.totals()
        span_s = max(now_ns - self._before_ns, 1) / 1e9
        changes: dict[str, list[float]] = {ALL: [0] * (COUNTED + 1)}
        for (op, world_size), counters in totals.items():
            before = self._before.get((op, world_size))
            change = [counters[place] - (before[place] if before else 0) for place in range(COUNTED)]
            if not any(change[:DURATIONS]) and not change[FAILED]:
                continue
            if op not in self._names and len(self._names) <= MAX_OPS:
                self._names.append(op)
            counts = [*change, change[BYTES] * bus_share(op, world_size)]
            for name in (ALL, op):
                known = changes.get(name, [0] * len(counts))
                changes[name] = [sum(pair) for pair in zip(known, counts, strict=True)]
        rows = {name: _row(change, span_s) for name, change in changes.items() if name in self._names}
        in_flight = self._metrics.in_flight()
        oldest_s = max(0, now_ns - in_flight[0].created_ns) / 1e9 if in_flight else 0.0
        self._points.append(_Point(time.time(), len(in_flight), oldest_s, rows))
        self._before, self._before_ns = totals, now_ns

    def document(self) -> dict[str, Any]:
        """Return the points as columns, oldest first, as charts need them."""
        points = list(self._points)
        return {
            "every_s": EVERY_S,
            "most": POINTS,
            "at_s": [round(point.at_s, 1) for point in points],
            "in_flight": [point.in_flight for point in points],
            "oldest_s": [round(point.oldest_s, 3) for point in points],
            "operations": {
                name: _columns([point.rows.get(name) for point in points]) for name in self._names
            },
        }


def _columns(rows: Sequence[array[float] | None]) -> dict[str, list[float | None]]:
    """Return the rows of one operation as columns; a percentile of no operation is None."""
    columns: dict[str, list[float | None]] = {}
    for place, field in enumerate(FIELDS):
        values = [0.0 if row is None else float(f"{row[place]:.4g}") for row in rows]  # enough for a chart
        columns[field] = [value or None for value in values] if field in PERCENTILES else list(values)
    return columns


def _row(change: Sequence[float], span_s: float) -> array[float]:
    durations = change[:DURATIONS]
    ended = sum(durations)
    return array(
        "d",
        (
            (ended + change[FAILED]) / span_s,
            change[BYTES] / span_s,
            change[BUS_BYTES] / span_s,
            change[FAILED],
            _quantile(durations, 0.5, ended),
            _quantile(durations, 0.99, ended),
        ),
    )


def _quantile(durations: Sequence[float], part: float, ended: float) -> float:
    """Return a quantile in seconds: linear inside a place, which holds those above half of its bound."""
    below = 0.0
    for place, count in enumerate(durations):
        if count and below + count >= part * ended:
            least = 2.0 ** (place - 1)
            return least * (1 + (part * ended - below) / count) / 1e9
        below += count
    return 0.0
