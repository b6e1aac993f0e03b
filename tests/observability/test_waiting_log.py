"""The log of a job that waits: one line for all of its ranks, again as it lasts, and one at the end."""

from __future__ import annotations

import time

import attrs
import pytest
from support.captured_logs import logged

from observability.job.verdict import Diagnosis, Missing, Waiting
from observability.job.waiting_log import WaitingLog


def waits(age_s: float, culprit: int = 2, seq: int = 7) -> Diagnosis:
    missing = (Missing(culprit, "", "it sleeps", answers=True),)
    waiting = Waiting(("uid", seq, False, -1), "g", "barrier", "barrier()", "", (0, 1), age_s, missing)
    return Diagnosis(verdict=("a", "b", "c", "d"), culprits=(culprit,), waiting=(waiting,))


def test_a_wait_is_logged_once_and_again_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = WaitingLog(quiet_s=15.0)
    with logged() as records:
        for clock[0], culprit in (
            (1005.0, 2),
            (1010.0, 2),
            (1040.0, 3),
            (1065.0, 3),
            (1070.0, 3),
            (1700.0, 3),
        ):
            log.diagnosed(0, waits(5.0, culprit))
            log.look(0)
        clock[0] = 1716.0
        log.look(0)
        log.look(0)
        log.diagnosed(0, Diagnosis())
    assert [(each["levelname"], each["event"]) for each in records] == [
        ("WARNING", "the job waits for 5.0 s: a; b; c"),
        ("WARNING", "the job waits for 40.0 s: a; b; c"),
        ("WARNING", "the job waits for 65.0 s: a; b; c"),
        ("ERROR", "the job waits for 700.0 s: a; b; c"),
        ("WARNING", "the job goes on, after a wait of about 700.0 s"),
    ]
    assert [each.get("culprits") for each in records] == [[2], [3], [3], [3], None]
    kept = [(each["level"], each["message"], each.get("culprits")) for each in log.lines]
    assert kept == [(each["levelname"], each["event"], each.get("culprits")) for each in records]


def test_short_waits_in_every_step_are_not_one_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 10 s, of which the ranks wait for 5 s, and less than that passes until they ask again."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = WaitingLog(quiet_s=16.0)
    with logged() as records:
        for step in range(80):
            clock[0] += 10.0
            log.look(0)
            log.diagnosed(0, waits(5.0, seq=step))
        clock[0] += 56.0
        log.diagnosed(0, waits(61.0, seq=79))  # in the end one is long
        clock[0] += 17.0
        log.look(0)
    assert [(each["levelname"], each["event"]) for each in records] == [
        ("WARNING", "the job waits for 5.0 s: a; b; c"),
        ("WARNING", "the job waits for 61.0 s: a; b; c"),
        ("WARNING", "the job goes on, after a wait of about 61.0 s"),
    ]


@pytest.mark.parametrize(("completed", "is_over"), [({"uid": 7}, True), ({"uid": 6}, False), ({}, False)])
def test_a_program_that_ends_soon_after_a_wait_logs_its_end(completed: dict[str, int], is_over: bool) -> None:
    log = WaitingLog(quiet_s=15.0)
    with logged() as records:
        log.close(0, lambda: completed)
        log.diagnosed(0, waits(5.0))
        log.close(0, lambda: completed)
    ends = [each["event"] for each in records if each["event"].startswith("the job goes on")]
    assert ends == ["the job goes on, after a wait of about 5.0 s"] * is_over


def test_a_second_wait_is_another_one() -> None:
    log = WaitingLog(quiet_s=15.0)
    with logged() as records:
        for found in (Diagnosis(), waits(1.0), Diagnosis(), waits(2.0)):
            log.diagnosed(4, found)
    events = [each["event"].partition(" s")[0] for each in records]
    assert events == [
        "the job waits for 1.0",
        "the job goes on, after a wait of about 1.0",
        "the job waits for 2.0",
    ]


def test_a_wait_is_not_over_while_ranks_pause_after_a_slow_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = WaitingLog(quiet_s=4.0, rests=5.0)
    with logged() as records:
        log.diagnosed(0, attrs.evolve(waits(1.0), took_s=1.2))
        for clock[0] in (1005.0, 1009.9):
            log.look(0)
        assert len(records) == 1
        clock[0] = 1010.1
        log.look(0)
    assert records[1]["event"] == "the job goes on, after a wait of about 1.0 s"
