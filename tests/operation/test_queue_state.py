"""`QueueState`: the turn and the numbers of a group's operations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from support.threads import together

from dist2.operation.queue import QueueState


def test_one_has_the_turn_and_others_queue() -> None:
    made = QueueState()
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


def test_the_thread_that_has_the_turn_is_known() -> None:
    made = QueueState()
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


def test_it_closes_once_and_only_when_nobody_is_there() -> None:
    made = QueueState()
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


def test_numbers_are_given_once() -> None:
    made = QueueState()
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


def test_the_turn_is_kept_for_the_next_or_laid_down_for_a_moment() -> None:
    made = QueueState()
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


def test_a_job_is_awaited_while_none_could_run() -> None:
    made = QueueState()
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


def test_nothing_is_awaited_after_the_end_but_what_is_queued() -> None:
    made = QueueState()
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


def test_no_wake_up_is_lost() -> None:
    made, ran = QueueState(), 0

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


def test_a_job_that_nobody_comes_for_is_found_at_once() -> None:
    made = QueueState()
    made.hurry()  # nothing is queued: nothing to hurry
    assert not made.await_job(0.001)
    made.issue()
    made.hurry()
    assert made.await_job(10.0)
    assert made.enter_queued()
    made.issue()
    made.hurry()  # a thread has the turn, and runs the queued jobs in time
    assert not made.idle
