"""The instruments of the process hold only what the tests of one file did."""

from __future__ import annotations

import pytest

from observability import flight_recorder, metrics


@pytest.fixture(autouse=True, scope="module")
def _no_operations_of_other_files() -> None:
    """Forget earlier operations: to scrape the thousands of series of other files takes seconds."""
    counters, recorder = metrics.instrument, flight_recorder.instrument
    for kept in (counters._fresh, counters._by_signature, counters._series, counters._past):
        kept.clear()
    recorder._ring.clear()
