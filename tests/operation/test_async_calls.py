"""Asynchronous collectives: records, outcomes and errors in all cases."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from support.instruments import Told, backend_does

import dist2
from dist2 import (
    GroupAbortedError,
    InvalidUsageError,
    OperationTimeoutError,
    ProcessGroup,
    ResourceError,
    add_instrument,
)
from dist2.operation.async_call import AsyncCall
from dist2.operation.record import Operation, State
from dist2.operation.work import Work
from dist2.runtime.threads import Worker


@pytest.fixture
def pg() -> Iterator[ProcessGroup]:
    """Yield a group of one, with two asynchronous calls behind it."""
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        pg.broadcast(torch.ones(2), 0, async_op=True).wait()
        assert type(pg.broadcast(torch.ones(2), 0, async_op=True)._pending) is AsyncCall
        pg._runner.drain()
        yield pg


def issue(pg: ProcessGroup) -> Work:
    return pg.all_reduce(torch.ones(2), async_op=True)


def test_a_call_is_told_and_returned(pg: ProcessGroup) -> None:
    told = Told()
    remove = add_instrument(told)
    unhook = pg.register_completion_hook(lambda operation: told.note("hook", operation))
    tensor = torch.ones(2)
    work = pg.all_reduce(tensor, async_op=True)
    assert work.wait() and work.is_success() and work.helper is None
    remove()
    unhook()
    assert told.events == [
        ("started", State.SCHEDULED, 3),
        ("finished", State.COMPLETED, 3),
        ("hook", State.COMPLETED, 3),
    ]
    assert type(work) is Work
    assert work.result() == [tensor]
    operation = work.operation
    assert f"#3 at {__file__}:" in operation.describe()
    assert operation.created_ns <= operation.started_ns < operation.finished_ns
    assert (operation.is_async, operation.error, pg.queued()) == (True, None, [])


def test_many_end_in_the_order_of_their_calls(pg: ProcessGroup) -> None:
    ran: list[int] = []
    backend_does(pg, lambda operation: ran.append(operation.seq))
    works = [issue(pg) for _ in range(50)]
    works[30].wait()
    assert works[30].is_completed()
    pg.all_reduce(torch.ones(2))  # takes its turn behind those that are queued
    assert ran == list(range(3, 54))
    assert all(work.is_success() for work in works)


def test_an_error_is_raised_by_each_wait_and_the_next_goes_on(pg: ProcessGroup) -> None:
    def refuse(operation: Operation) -> None:
        if operation.seq == 3:
            raise InvalidUsageError("not this one")

    backend_does(pg, refuse)
    first, second = issue(pg), issue(pg)
    for _ in range(2):
        with pytest.raises(InvalidUsageError, match="not this one") as caught:
            first.wait()
        assert (caught.value.op, caught.value.seq) == ("all_reduce", 3)
    assert first.exception() is caught.value and not first.is_success()
    assert second.wait() and second.exception() is None
    assert pg._runner.queue.idle


def test_an_interrupt_breaks_the_group_and_what_is_queued(pg: ProcessGroup) -> None:
    def interrupt(operation: Operation) -> None:
        raise KeyboardInterrupt

    backend_does(pg, interrupt)
    first = issue(pg)
    with pytest.raises(KeyboardInterrupt):
        first.wait()
    with pytest.raises(GroupAbortedError, match="interrupted by KeyboardInterrupt"):
        issue(pg)


def test_what_is_queued_behind_a_failure_is_refused(pg: ProcessGroup) -> None:
    def fail(operation: Operation) -> None:
        raise OperationTimeoutError("too late")

    backend_does(pg, fail)
    inside = pg._runner.queue.enter()  # so that both are queued before one of them runs
    assert inside
    works = [issue(pg), issue(pg)]
    pg._runner.queue.leave()
    for work, message in zip(works, ["too late", "cannot be used any more"], strict=True):
        with pytest.raises(OperationTimeoutError, match=message):
            work.wait()


def test_what_the_backend_completes_later_is_waited_for(pg: ProcessGroup) -> None:
    later: Future[None] = Future()
    backend_does(pg, lambda operation: later)
    work = issue(pg)
    timer = threading.Timer(0.05, later.set_result, [None])
    timer.start()
    assert work.wait() and later.done()
    assert work.operation.state is State.COMPLETED
    timer.join()


def test_who_gives_up_waiting_leaves_it_and_others_are_called_back(pg: ProcessGroup) -> None:
    free = threading.Event()

    def wait(operation: Operation) -> None:
        free.wait(20.0)

    backend_does(pg, wait)
    work, called = issue(pg), list[str]()
    work.add_done_callback(lambda: called.append("first"))
    with pytest.raises(OperationTimeoutError, match="still running"):
        work.wait(0.02)
    assert not work.is_completed() and work.exception() is None
    waiters = [threading.Thread(target=work.wait) for _ in range(2)]
    for each in waiters:
        each.start()
    free.set()
    for each in waiters:
        each.join(10.0)
    assert work.wait()
    work.add_done_callback(lambda: called.append("second"))
    assert called == ["first", "second"]


@pytest.mark.parametrize("by_the_thread", [False, True])
def test_a_call_from_within_that_would_wait_for_itself_is_refused(
    pg: ProcessGroup, by_the_thread: bool
) -> None:
    told: list[str] = []

    def nest(operation: Operation) -> None:
        if operation.seq == 3:
            try:
                pg.all_reduce(torch.ones(2))
            except InvalidUsageError as error:
                told.append(str(error))

    backend_does(pg, nest)
    work = issue(pg)
    if by_the_thread:
        work.get_future().wait()
    else:
        work.wait()
    assert len(told) == 1 and "in the midst of another operation of group" in told[0]
    pg.all_reduce(torch.ones(2))


def test_a_call_that_no_thread_can_be_started_for_fails_and_the_next_is_served(
    pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(worker: Worker) -> None:
        raise RuntimeError("can't start new thread")

    pg._runner.queue.stop()  # the next call needs another
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", refuse)
        with pytest.raises(ResourceError, match="raise the limits of threads"):
            issue(pg)
    assert not pg._runner._in_flight
    ended = threading.Event()
    work = issue(pg)
    work.get_future().add_done_callback(lambda _: ended.set())
    assert ended.wait(5), "a thread runs it though nobody waits for the Work"
    assert work.operation.seq == 3


def test_a_block_whose_calls_no_thread_can_be_started_for_leaves_none_pending(
    pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(worker: Worker) -> None:
        raise RuntimeError("can't start new thread")

    pg._runner.queue.stop()
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", refuse)
        with pytest.raises(ResourceError, match="raise the limits of threads"), pg.coalescing():
            works = [pg.all_reduce(torch.ones(2)) for _ in range(3)]
    for work in works:
        with pytest.raises(ResourceError, match="raise the limits of threads"):
            work.wait()
    issue(pg).wait()


def test_a_future_ends_though_nobody_waits_for_the_work(pg: ProcessGroup) -> None:
    tensor = torch.ones(2)
    assert pg.all_reduce(tensor, async_op=True).get_future().wait() == [tensor]


def test_all_is_let_go_without_the_garbage_collector(pg: ProcessGroup) -> None:
    gc.disable()
    try:
        tensor = torch.ones(2)
        work = pg.all_reduce(tensor, async_op=True)
        work.wait()
        gone = weakref.ref(work), weakref.ref(tensor)
        del work, tensor
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_it_is_done_once(pg: ProcessGroup) -> None:
    work = issue(pg)
    pending = work._pending
    work.wait()
    with pytest.raises(RuntimeError, match="done already"):
        pending.set_result(None)
