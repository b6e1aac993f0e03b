"""The queue: one collective of a group at a time, in the order issued."""

from __future__ import annotations

import threading
import weakref
from time import monotonic

import pytest
from support.threads import together

from dist2.operation import queue as queue_module
from dist2.operation.kinds import OpKind
from dist2.operation.queue import CollectiveQueue
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature
from dist2.runtime.deadline import deadline_in


def operation() -> Operation:
    info = GroupInfo("uid", "group", "", "fake", 0, (0,))
    return Operation(Signature(OpKind.BARRIER, info), 0, 0, 0, True)


def ignore() -> None:
    """The end of a queue is of no interest here."""


def waited(event: threading.Event) -> None:
    """Keep the queue until something happens."""
    event.wait(5)


def test_whoever_waits_for_a_queue_to_be_empty_waits_for_those_beside_it_as_well() -> None:
    queue = CollectiveQueue("test")
    queue.enter_beside()
    assert not queue.await_empty(deadline_in(0.01))
    threading.Timer(0.02, queue.leave_beside).start()
    assert queue.await_empty(deadline_in(10.0))
    assert queue.empty


def test_only_the_last_to_leave_retires_a_queue() -> None:
    queue = CollectiveQueue("test")
    assert queue.enter() == 1
    queue.enter_beside()
    assert not queue.retire()
    queue.leave()
    assert not queue.retire()
    queue.leave_beside()
    assert queue.retire()
    assert not queue.retire()


def test_a_retired_queue_has_no_thread() -> None:
    queue = CollectiveQueue("test")
    ran = threading.Event()
    queue.put(operation(), ran.set, ignore)
    assert ran.wait(5)
    thread = queue._thread
    assert thread is not None
    assert queue.drain(5)
    assert queue.retire()
    thread.join(queue_module.IDLE_S / 2)
    assert not thread.is_alive()


def test_an_idle_queue_is_entered_and_numbers() -> None:
    queue = CollectiveQueue("test")
    assert queue.enter() == 1
    assert queue.enter() == 0
    queue.leave()
    assert queue.enter() == 2
    queue.leave()
    assert queue.drain(1)


def test_jobs_run_in_order_after_what_is_inside() -> None:
    queue = CollectiveQueue("test")
    ran: list[int] = []
    done = threading.Event()
    assert queue.enter() == 1
    calls = [operation() for _ in range(5)]
    for call in calls:
        queue.put(call, lambda call=call: ran.append(call.seq), ignore)
    last = operation()
    queue.put(last, done.set, ignore)
    assert [call.seq for call in calls] == [2, 3, 4, 5, 6]
    assert queue.enter() == 0
    assert ran == []
    queue.leave()
    assert done.wait(5)
    assert ran == [2, 3, 4, 5, 6]
    assert queue.drain(5)
    assert queue.enter() == 8
    queue.leave()
    queue.stop()


def test_it_tells_by_when_all_that_is_queued_has_ended() -> None:
    queue, go = CollectiveQueue("limits"), threading.Event()

    def put(deadline_ns: int) -> int:
        info = GroupInfo("uid", "group", "", "fake", 0, (0,))
        limited = Operation(Signature(OpKind.BARRIER, info), 0, 0, deadline_ns, True)
        return queue.put(limited, lambda: waited(go), ignore)

    assert queue.enter() == 1  # so that nothing begins
    assert [put(deadline_ns) for deadline_ns in (5, 3, 9, 7)] == [5, 5, 9, 9]
    go.set()
    queue.leave()
    assert queue.drain(5)
    assert put(2) == 2
    assert queue.drain(5)
    queue.stop()


def test_drain_gives_up_in_time_and_sees_the_end() -> None:
    queue = CollectiveQueue("test")
    go = threading.Event()
    queue.put(operation(), lambda: waited(go), ignore)
    assert not queue.drain(0.05)
    go.set()
    assert queue.drain(5)
    queue.stop()


def test_stop_ends_the_thread() -> None:
    queue = CollectiveQueue("stopping")
    done = threading.Event()
    queue.put(operation(), done.set, ignore)
    assert done.wait(5)
    queue.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "dist2-collectives-stopping"]


def test_an_idle_thread_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "IDLE_S", 0.01)
    queue = CollectiveQueue("idle")
    for _ in range(3):
        done = threading.Event()
        queue.put(operation(), done.set, ignore)
        assert done.wait(5)
        thread = queue._thread
        if thread is not None:
            thread.join(5)
            assert not thread.is_alive()


def test_the_thread_lets_go_of_its_last_job() -> None:
    queue = CollectiveQueue("letting-go")
    job = threading.Event()
    gone = weakref.ref(job)
    left = threading.Event()
    queue.put(operation(), job.set, left.set)
    assert left.wait(5)
    del job
    deadline = monotonic() + 5
    while gone() is not None and monotonic() < deadline:
        pass
    assert gone() is None
    queue.stop()


def test_many_threads_get_distinct_numbers() -> None:
    queue = CollectiveQueue("test")
    seen: list[int] = []
    lock = threading.Lock()

    def body() -> None:
        for _ in range(200):
            seq = queue.enter()
            if seq:
                queue.leave()
            else:
                call, done = operation(), threading.Event()
                queue.put(call, done.set, ignore)
                assert done.wait(5)
                seq = call.seq
            with lock:
                seen.append(seq)

    together(body, body, body, body)
    assert sorted(seen) == list(range(1, 801))
    queue.stop()


def test_who_waits_runs_what_is_queued_up_to_its_own() -> None:
    queue = CollectiveQueue("helping")
    assert queue.enter() == 1  # so that the thread cannot begin
    ran: list[tuple[int, int]] = []

    def job(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for number in range(4):
        queue.put(operation(), lambda number=number: job(number), ignore)
    queue.leave()
    me = threading.get_ident()
    while not ran:  # the thread may be faster with the first ones
        queue.help(lambda: any(number == 2 for number, _ in ran))
    assert queue.drain(5)
    assert [number for number, _ in ran] == [0, 1, 2, 3]
    assert {thread for _, thread in ran} <= {me, queue._thread.ident if queue._thread else me}
    queue.stop()


def test_who_waits_does_not_run_what_comes_after_its_own() -> None:
    queue = CollectiveQueue("no-further")
    others = threading.Event()
    ran: list[str] = []
    queue.put(operation(), lambda: ran.append("mine"), ignore)
    queue.put(operation(), lambda: waited(others), ignore)
    queue.help(lambda: "mine" in ran)  # returns, though the next one cannot end yet
    others.set()
    assert queue.drain(5)
    assert ran == ["mine"]
    queue.stop()


class Threadless(CollectiveQueue):
    """One whose thread does nothing."""

    def _run(self) -> None:
        """Leave all jobs to threads that wait."""


def test_what_a_job_returns_is_raised_by_whoever_waits_and_ran_it() -> None:
    queue, left = Threadless("interrupted"), list[bool]()
    queue.put(operation(), KeyboardInterrupt, lambda: left.append(queue.idle))
    with pytest.raises(KeyboardInterrupt):
        queue.help(lambda: False)
    assert left == [True]
    assert queue.enter() == 2


def test_what_a_job_returns_does_not_concern_the_thread() -> None:
    queue, done = CollectiveQueue("undisturbed"), threading.Event()
    queue.put(operation(), KeyboardInterrupt, ignore)
    queue.put(operation(), done.set, ignore)
    assert done.wait(5)
    queue.stop()


def test_the_thread_runs_what_nobody_waits_for_after_somebody_helped() -> None:
    queue = CollectiveQueue("both")
    for _ in range(50):
        mine, other = threading.Event(), threading.Event()
        queue.put(operation(), mine.set, ignore)
        queue.put(operation(), other.set, ignore)
        queue.help(mine.is_set)
        assert mine.wait(5)
        assert other.wait(5)
    queue.stop()


@pytest.mark.parametrize("behind", [0, 2])
def test_a_callback_may_wait_for_what_is_queued(behind: int) -> None:
    """The thread that reports a job's end has the turn, and may be the one that would run the next."""
    queue, ran, told = CollectiveQueue("told"), list[int](), threading.Event()
    mine = operation()

    def tell() -> None:
        ended = threading.Event()
        queue.put(operation(), ended.set, ignore)
        queue.hurry()
        assert ended.wait(5)
        told.set()

    def job() -> None:
        mine.finished_ns = 1
        tell()

    with_turn = threading.Event()
    queue.put(operation(), lambda: waited(with_turn), ignore)
    queue.put(mine, job, ignore)
    for number in range(behind):
        queue.put(operation(), lambda number=number: ran.append(number), ignore)
    with_turn.set()
    assert told.wait(10)
    assert queue.drain(5)
    assert ran == list(range(behind))
    assert queue.enter()
    queue.leave()
    queue.stop()


def test_the_turn_is_kept_in_the_midst_of_a_job() -> None:
    queue, order, done = CollectiveQueue("midst"), list[str](), threading.Event()

    def job() -> None:
        queue.put(operation(), lambda: order.append("next") or done.set(), ignore)
        queue.hurry()
        done.wait(0.05)
        order.append("job")

    queue.put(operation(), job, ignore)
    assert done.wait(5)
    assert order == ["job", "next"]
    queue.stop()


def test_a_job_is_numbered_before_it_runs() -> None:
    seen: list[int] = []

    class Slow(CollectiveQueue):
        def issue(self) -> int:
            seq = super().issue()
            threading.Event().wait(0.002)  # the thread is awake, and faster than the one that queued the job
            return seq

    queue = Slow("numbered")
    for _ in range(5):
        call = operation()
        queue.put(call, lambda call=call: seen.append(call.seq), ignore)
    assert queue.drain(5)
    assert seen == [1, 2, 3, 4, 5]
    queue.stop()
