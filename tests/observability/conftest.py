"""The instruments of the process hold only the groups and operations of the tests of one file."""

from __future__ import annotations

import pytest

from dist2.group.open_groups import open_groups
from observability import flight_recorder, metrics


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_files() -> None:
    """Forget earlier groups and operations: to scrape thousands of series takes seconds."""
    for group in open_groups():  # of a test that failed, or that garbage would have closed
        group.abort()
    counters, recorder = metrics.instrument, flight_recorder.instrument
    statuses = counters.statuses
    for listed in (statuses._open, statuses._closed, statuses._failures):
        listed.clear()
    for kept in (counters._fresh, counters._by_signature, counters._series, counters._past):
        kept.clear()
    recorder._ring.clear()
