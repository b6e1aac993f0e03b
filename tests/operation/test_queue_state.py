"""QueueState in C and in Python mean the same."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.threads import together

from dist2.compiled import records
from dist2.operation import queue as turns_module
from dist2.operation.queue import PythonQueueState

compiled = pytest.mark.skipif(records is None, reason="the part in C is not built, or turned off")
TYPES: list[Any] = [
    pytest.param(PythonQueueState, id="python"),
    pytest.param(getattr(records, "QueueState", None), id="c", marks=compiled),
]


@pytest.mark.parametrize("turns", TYPES)
def test_one_has_the_turn_and_others_queue(turns: type[PythonQueueState]) -> None:
    made = turns()
    assert made.idle
    assert made.enter() == 1
    assert (made.enter(), made.enter_queued(), made.idle) == (0, False, False)
    assert made.issue() == 2
    assert not made.enter_queued()
    assert made.left()
    assert made.enter() == 0  # the one that queues comes first
    assert made.enter_queued()
    assert not made.left()
    assert (made.enter(), made.seq) == (3, 3)
    assert (made.number_message(), made.number_message(), made.messages, made.seq) == (1, 2, 2, 3)
    made.drainers += 1
    assert made.left()
    made.drainers -= 1


@pytest.mark.parametrize("turns", TYPES)
def test_the_thread_that_has_the_turn_is_known(turns: type[PythonQueueState]) -> None:
    made = turns()
    assert not made.is_held_here
    made.enter()
    assert made.is_held_here
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(lambda: made.is_held_here).result()
    made.left()
    assert not made.is_held_here
    made.issue()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: (made.enter_queued(), made.is_held_here)).result() == (True, True)
        assert not made.is_held_here
    made.lay_down()
    assert not made.is_held_here


@pytest.mark.parametrize("turns", TYPES)
def test_it_closes_once_and_only_when_nobody_is_there(turns: type[PythonQueueState]) -> None:
    made = turns()
    assert made.empty
    made.enter_beside()
    assert (made.close(), made.empty) == (False, False)
    made.leave_beside()
    made.issue()
    assert (made.close(), made.empty) == (False, False)
    assert made.enter_queued()
    assert (made.close(), made.empty) == (False, False)
    made.left()
    assert made.empty
    assert made.close()
    assert not made.close()


@pytest.mark.parametrize("turns", TYPES)
def test_numbers_are_given_once(turns: type[PythonQueueState]) -> None:
    made = turns()
    seen: list[int] = []

    def body() -> None:
        for _ in range(2000):
            if seq := made.enter():
                seen.append(seq)
                made.left()
            else:
                made.enter_beside()
                made.leave_beside()

    together(body, body, body)
    assert sorted(seen) == list(range(1, made.seq + 1))
    assert made.close()


@pytest.mark.parametrize("turns", TYPES)
def test_the_turn_is_kept_for_the_next_or_laid_down_for_a_moment(turns: type[PythonQueueState]) -> None:
    made = turns()
    assert made.enter() == 1
    assert not made.pass_on()
    assert not made.lay_down()
    made.issue()
    made.issue()
    assert made.enter_queued()
    assert made.pass_on()
    assert (made.enter(), made.enter_queued()) == (0, False)  # it is still taken
    assert not made.pass_on()
    made.issue()
    assert made.lay_down()
    assert made.enter_queued()
    assert not made.left()


@pytest.mark.parametrize("turns", TYPES)
def test_a_job_is_awaited_while_none_could_run(turns: type[PythonQueueState]) -> None:
    made = turns()
    assert not made.await_job(0.001)
    made.issue()
    assert made.await_job(10.0)
    assert made.await_job(10.0)  # asking changes nothing
    assert made.enter_queued()
    assert not made.await_job(0.001)
    made.issue()
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(made.await_job(10.0)))
    waiter.start()
    waiter.join(0.02)
    assert waiter.is_alive()  # a thread has the turn
    made.left()
    waiter.join(5)
    assert found == [True]


@pytest.mark.parametrize("turns", TYPES)
def test_nothing_is_awaited_after_the_end_but_what_is_queued(turns: type[PythonQueueState]) -> None:
    made = turns()
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(made.await_job(10.0)))
    waiter.start()
    waiter.join(0.01)
    made.end()
    waiter.join(5)
    assert found == [False]
    made.issue()
    assert made.await_job(10.0)
    assert made.enter_queued()
    assert not made.await_job(10.0)
    made.issue()  # while the other is inside
    waiter = threading.Thread(target=lambda: found.append(made.await_job(10.0)))
    waiter.start()
    waiter.join(0.01)
    assert waiter.is_alive()
    made.left()
    waiter.join(5)
    assert found == [False, True]


@pytest.mark.parametrize("turns", TYPES)
def test_no_wake_up_is_lost(turns: type[PythonQueueState]) -> None:
    made, ran = turns(), 0

    def body() -> None:
        nonlocal ran
        while made.await_job(10.0):
            if made.enter_queued():
                ran += 1
                made.left()

    thread = threading.Thread(target=body)
    thread.start()
    for _ in range(300):
        made.issue()
        if made.seq % 3 == 0:
            thread.join(0.0015)  # long enough for it to fall asleep, now and then
    made.end()
    thread.join(10)
    assert ran == 300


@pytest.mark.parametrize("turns", TYPES)
def test_a_job_that_nobody_comes_for_is_found_at_once(
    turns: type[PythonQueueState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "PATIENCE_S", 3600.0)  # in C the value is fixed
    made = turns()
    made.hurry()  # nothing is queued: nothing to hurry
    assert not made.await_job(0.001)
    made.issue()
    made.hurry()
    assert made.await_job(10.0)
    assert made.enter_queued()
    made.issue()
    made.hurry()  # a thread has the turn, and runs the queued jobs in time
    assert not made.idle
