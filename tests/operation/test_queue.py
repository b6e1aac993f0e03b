"""The lane: one collective of a group at a time, in the order issued."""

from __future__ import annotations

import threading
import weakref
from time import monotonic

import pytest
from support.threads import together

from dist2.operation import queue as lane_module
from dist2.operation.kinds import OpKind
from dist2.operation.queue import CollectiveQueue
from dist2.operation.signature import GroupInfo, Operation, Signature
from dist2.runtime.deadline import deadline_in


def operation() -> Operation:
    info = GroupInfo("uid", "group", "", "fake", 0, (0,))
    return Operation(Signature(OpKind.BARRIER, info), 0, 0, 0, True)


def ignore() -> None:
    """Nobody needs to know that the lane was left."""


def waited(event: threading.Event) -> None:
    """Keep the lane until something happens."""
    event.wait(5)


def test_whoever_waits_for_a_lane_to_be_empty_waits_for_those_beside_it_as_well() -> None:
    lane = CollectiveQueue("test")
    lane.enter_beside()
    assert not lane.await_empty(deadline_in(0.01))
    threading.Timer(0.02, lane.leave_beside).start()
    assert lane.await_empty(deadline_in(10.0))
    assert lane.empty


def test_only_the_last_to_leave_retires_a_lane() -> None:
    lane = CollectiveQueue("test")
    assert lane.enter() == 1
    lane.enter_beside()
    assert not lane.retire()
    lane.leave()
    assert not lane.retire()
    lane.leave_beside()
    assert lane.retire()
    assert not lane.retire()


def test_a_retired_lane_has_no_thread() -> None:
    lane = CollectiveQueue("test")
    ran = threading.Event()
    lane.put(operation(), ran.set, ignore)
    assert ran.wait(5)
    thread = lane._thread
    assert thread is not None
    assert lane.drain(5)
    assert lane.retire()
    thread.join(lane_module.IDLE_S / 2)
    assert not thread.is_alive()


def test_an_idle_lane_is_entered_and_numbers() -> None:
    lane = CollectiveQueue("test")
    assert lane.enter() == 1
    assert lane.enter() == 0
    lane.leave()
    assert lane.enter() == 2
    lane.leave()
    assert lane.drain(1)


def test_jobs_run_in_order_after_what_is_inside() -> None:
    lane = CollectiveQueue("test")
    ran: list[int] = []
    done = threading.Event()
    assert lane.enter() == 1
    calls = [operation() for _ in range(5)]
    for call in calls:
        lane.put(call, lambda call=call: ran.append(call.seq), ignore)
    last = operation()
    lane.put(last, done.set, ignore)
    assert [call.seq for call in calls] == [2, 3, 4, 5, 6]
    assert lane.enter() == 0
    assert ran == []
    lane.leave()
    assert done.wait(5)
    assert ran == [2, 3, 4, 5, 6]
    assert lane.drain(5)
    assert lane.enter() == 8
    lane.leave()
    lane.stop()


def test_it_tells_by_when_all_that_is_queued_has_ended() -> None:
    lane, go = CollectiveQueue("limits"), threading.Event()

    def put(deadline_ns: int) -> int:
        info = GroupInfo("uid", "group", "", "fake", 0, (0,))
        limited = Operation(Signature(OpKind.BARRIER, info), 0, 0, deadline_ns, True)
        return lane.put(limited, lambda: waited(go), ignore)

    assert lane.enter() == 1  # so that nothing begins
    assert [put(deadline_ns) for deadline_ns in (5, 3, 9, 7)] == [5, 5, 9, 9]
    go.set()
    lane.leave()
    assert lane.drain(5)
    assert put(2) == 2
    assert lane.drain(5)
    lane.stop()


def test_drain_gives_up_in_time_and_sees_the_end() -> None:
    lane = CollectiveQueue("test")
    go = threading.Event()
    lane.put(operation(), lambda: waited(go), ignore)
    assert not lane.drain(0.05)
    go.set()
    assert lane.drain(5)
    lane.stop()


def test_stop_ends_the_thread() -> None:
    lane = CollectiveQueue("stopping")
    done = threading.Event()
    lane.put(operation(), done.set, ignore)
    assert done.wait(5)
    lane.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "dist2-lane-stopping"]


def test_an_idle_thread_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "IDLE_S", 0.01)
    lane = CollectiveQueue("idle")
    for _ in range(3):
        done = threading.Event()
        lane.put(operation(), done.set, ignore)
        assert done.wait(5)
        thread = lane._thread
        if thread is not None:
            thread.join(5)
            assert not thread.is_alive()


def test_the_thread_lets_go_of_its_last_job() -> None:
    lane = CollectiveQueue("letting-go")
    job = threading.Event()
    gone = weakref.ref(job)
    left = threading.Event()
    lane.put(operation(), job.set, left.set)
    assert left.wait(5)
    del job
    deadline = monotonic() + 5
    while gone() is not None and monotonic() < deadline:
        pass
    assert gone() is None
    lane.stop()


def test_many_threads_get_distinct_numbers() -> None:
    lane = CollectiveQueue("test")
    seen: list[int] = []
    lock = threading.Lock()

    def body() -> None:
        for _ in range(200):
            seq = lane.enter()
            if seq:
                lane.leave()
            else:
                call, done = operation(), threading.Event()
                lane.put(call, done.set, ignore)
                assert done.wait(5)
                seq = call.seq
            with lock:
                seen.append(seq)

    together(body, body, body, body)
    assert sorted(seen) == list(range(1, 801))
    lane.stop()


def test_who_waits_runs_what_is_queued_up_to_its_own() -> None:
    lane = CollectiveQueue("helping")
    assert lane.enter() == 1  # so that the thread cannot begin
    ran: list[tuple[int, int]] = []

    def job(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for number in range(4):
        lane.put(operation(), lambda number=number: job(number), ignore)
    lane.leave()
    me = threading.get_ident()
    while not ran:  # the thread may be faster with the first ones
        lane.help(lambda: any(number == 2 for number, _ in ran))
    assert lane.drain(5)
    assert [number for number, _ in ran] == [0, 1, 2, 3]
    assert {thread for _, thread in ran} <= {me, lane._thread.ident if lane._thread else me}
    lane.stop()


def test_who_waits_does_not_run_what_comes_after_its_own() -> None:
    lane = CollectiveQueue("no-further")
    others = threading.Event()
    ran: list[str] = []
    lane.put(operation(), lambda: ran.append("mine"), ignore)
    lane.put(operation(), lambda: waited(others), ignore)
    lane.help(lambda: "mine" in ran)  # returns, though the next one cannot end yet
    others.set()
    assert lane.drain(5)
    assert ran == ["mine"]
    lane.stop()


class Threadless(CollectiveQueue):
    """One whose thread does nothing."""

    def _run(self) -> None:
        """Leave all to whoever waits."""


def test_what_a_job_returns_is_raised_by_whoever_waits_and_ran_it() -> None:
    lane, left = Threadless("interrupted"), list[bool]()
    lane.put(operation(), KeyboardInterrupt, lambda: left.append(lane.idle))
    with pytest.raises(KeyboardInterrupt):
        lane.help(lambda: False)
    assert left == [True]
    assert lane.enter() == 2


def test_what_a_job_returns_does_not_concern_the_thread() -> None:
    lane, done = CollectiveQueue("undisturbed"), threading.Event()
    lane.put(operation(), KeyboardInterrupt, ignore)
    lane.put(operation(), done.set, ignore)
    assert done.wait(5)
    lane.stop()


def test_the_thread_runs_what_nobody_waits_for_after_somebody_helped() -> None:
    lane = CollectiveQueue("both")
    for _ in range(50):
        mine, other = threading.Event(), threading.Event()
        lane.put(operation(), mine.set, ignore)
        lane.put(operation(), other.set, ignore)
        lane.help(mine.is_set)
        assert mine.wait(5)
        assert other.wait(5)
    lane.stop()


@pytest.mark.parametrize("behind", [0, 2])
def test_a_callback_may_wait_for_what_is_queued(behind: int) -> None:
    """Whoever tells that a job is done has the turn, and may be the thread that would run the next."""
    lane, ran, told = CollectiveQueue("told"), list[int](), threading.Event()
    mine = operation()

    def tell() -> None:
        ended = threading.Event()
        lane.put(operation(), ended.set, ignore)
        lane.hurry()
        assert ended.wait(5)
        told.set()

    def job() -> None:
        mine.finished_ns = 1
        tell()

    with_turn = threading.Event()
    lane.put(operation(), lambda: waited(with_turn), ignore)
    lane.put(mine, job, ignore)
    for number in range(behind):
        lane.put(operation(), lambda number=number: ran.append(number), ignore)
    with_turn.set()
    assert told.wait(10)
    assert lane.drain(5)
    assert ran == list(range(behind))
    assert lane.enter()
    lane.leave()
    lane.stop()


def test_the_turn_is_kept_in_the_midst_of_a_job() -> None:
    lane, order, done = CollectiveQueue("midst"), list[str](), threading.Event()

    def job() -> None:
        lane.put(operation(), lambda: order.append("next") or done.set(), ignore)
        lane.hurry()
        done.wait(0.05)
        order.append("job")

    lane.put(operation(), job, ignore)
    assert done.wait(5)
    assert order == ["job", "next"]
    lane.stop()


def test_a_job_is_numbered_before_it_runs() -> None:
    seen: list[int] = []

    class Slow(CollectiveQueue):
        def issue(self) -> int:
            seq = super().issue()
            threading.Event().wait(0.002)  # the thread is awake, and faster than whoever put the job
            return seq

    lane = Slow("numbered")
    for _ in range(5):
        call = operation()
        lane.put(call, lambda call=call: seen.append(call.seq), ignore)
    assert lane.drain(5)
    assert seen == [1, 2, 3, 4, 5]
    lane.stop()
