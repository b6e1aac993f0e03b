"""Deadlines of store calls: how long a pause is, and how often something is looked at until then."""

from __future__ import annotations

import math
from datetime import timedelta
from itertools import islice

import pytest

from dist2 import HashStore
from dist2.errors import InvalidUsageError
from dist2.runtime import deadline as deadline_module
from dist2.runtime.deadline import FOREVER_NS, PAST_NS, Deadline, checked_timeout, extended, seconds

FOREVER = Deadline(FOREVER_NS, 0.0)
PASSED = Deadline(PAST_NS, 1.0)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses that are made from now on; time stands still meanwhile, but for them."""
    slept: list[float] = []
    monkeypatch.setattr(deadline_module, "sleep", slept.append)

    def now() -> int:
        return 1_000_000_000 + round(sum(slept) * 1e9)

    monkeypatch.setattr(deadline_module, "monotonic_ns", now)
    monkeypatch.setattr(deadline_module, "remaining_s", lambda ns: max(0, ns - now()) / 1e9)
    return slept


def test_pauses_grow_up_to_the_longest(slept: list[float]) -> None:
    assert sum(1 for _ in islice(FOREVER.tries(0.25, 0.5), 5)) == 5
    assert slept == [0.25, 0.375, 0.5, 0.5]


def test_the_last_try_is_when_the_deadline_has_passed(slept: list[float]) -> None:
    deadline = Deadline(1_500_000_000, 0.5)
    assert [deadline.passed for _ in deadline.tries(0.25, 1.0)] == [False, False, True]
    assert slept == [0.25, 0.25]  # not the 0.375 that would come next


def test_a_passed_deadline_leaves_one_try(slept: list[float]) -> None:
    assert sum(1 for _ in PASSED.tries(0.25, 0.5)) == 1
    assert not slept


def test_a_pause_ends_with_the_deadline(slept: list[float]) -> None:
    FOREVER.pause(3.0)
    PASSED.pause(3.0)
    assert slept == [3.0, 0.0]


def test_a_deadline_that_passes_while_the_process_is_stopped_is_later_by_that_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, second = deadline_module.monotonic_ns(), 1_000_000_000
    monkeypatch.setattr(deadline_module, "_stop", (0, 0))
    monkeypatch.setattr(deadline_module, "monotonic_ns", lambda: began + 9 * second)
    deadline_module.note_wait(began, began + 8 * second + 1)  # a little late
    assert extended(began + second) == began + second
    deadline_module.note_wait(began, began + second)
    assert extended(began - 1) == began - 1  # it had passed before
    assert extended(began + second) == began + 10 * second
    assert extended(began + 9 * second) == began + 9 * second
    assert extended(FOREVER_NS) == FOREVER_NS


@pytest.mark.parametrize("given", [math.inf, 1e15, timedelta.max])
def test_a_limit_that_is_too_long_is_the_longest(given: float | timedelta) -> None:
    assert seconds(given) == checked_timeout(given).total_seconds() == 1e9
    store = HashStore(given)
    store.set("key", "value")
    store.wait(["key"], given)
    assert not Deadline.after(given).passed


def test_a_limit_that_is_no_number_is_refused() -> None:
    for check in (seconds, checked_timeout):
        with pytest.raises(InvalidUsageError, match=r"must .*, got nan"):
            check(math.nan)
