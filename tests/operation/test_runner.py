"""The course of operations: records, outcomes and errors in all cases."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.instruments import Told, backend_does
from support.torch_features import needs

import dist2
from dist2 import GroupAbortedError, InvalidUsageError, OperationTimeoutError, ProcessGroup, add_instrument
from dist2.operation.record import Operation, State
from dist2.operation.runner import OperationRunner
from dist2.operation.work import Work
from dist2.runtime.signals import ctrl_c


@pytest.fixture(params=["first", "usual"])
def pg(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """Yield a group of one, with calls that take the methods in Python, or pass them by."""
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        if request.param == "first":
            for name in ("all_reduce", "send"):
                method = inspect.unwrap(getattr(type(pg), name))
                monkeypatch.setattr(pg, name, method.__get__(pg))
        yield pg


@pytest.mark.parametrize("name", ["all_reduce", "send"])
def test_a_call_is_told_and_returned(pg: ProcessGroup, name: str) -> None:
    told = Told()
    remove = add_instrument(told)
    unhook = pg.register_completion_hook(lambda operation: told.note("hook", operation))
    tensor = torch.ones(2)
    arguments = () if name == "all_reduce" else (0,)
    work = getattr(pg, name)(tensor, *arguments)
    line = sys._getframe().f_lineno - 1
    remove()
    unhook()
    assert told.events == [
        ("started", State.SCHEDULED, 1),
        ("finished", State.COMPLETED, 1),
        ("hook", State.COMPLETED, 1),
    ]
    assert isinstance(work, Work)
    assert isinstance(work, torch.distributed.Work)
    assert work.wait() and work.is_success() and work.helper is None
    assert list(work.outputs) == ([tensor] if name == "all_reduce" else [])
    operation = work.operation
    assert operation.describe().endswith(f"#1 at {__file__}:{line}")
    assert operation.created_ns == operation.started_ns < operation.finished_ns
    assert (operation.is_async, operation.error) == (False, None)
    assert operation.timeout_s == pg.timeout_s
    assert getattr(pg, name)(tensor, *arguments) is not work


@pytest.mark.parametrize("name", ["all_reduce", "send"])
def test_an_error_names_the_operation_and_leaves_the_queue(pg: ProcessGroup, name: str) -> None:
    def refuse(operation: Operation) -> None:
        raise InvalidUsageError("not this one")

    backend_does(pg, refuse)
    failed: list[Operation] = []
    pg.register_completion_hook(failed.append)
    arguments = () if name == "all_reduce" else (0,)
    for seq in (1, 2):
        with pytest.raises(InvalidUsageError, match="not this one") as caught:
            getattr(pg, name)(torch.ones(2), *arguments)
        assert (caught.value.op, caught.value.seq, caught.value.group) == (name, seq, pg.info.name)
        assert caught.value.__context__ is None
    assert [each.state for each in failed] == [State.FAILED] * 2
    assert pg._runner.queue.idle
    assert pg._runner.queue.close()  # no call is counted as beside it, either


@pytest.mark.parametrize("async_op", [False, True])
def test_outputs_of_a_refused_operation_keep_their_values(pg: ProcessGroup, async_op: bool) -> None:
    errors: list[Exception] = [InvalidUsageError("nothing was done"), OperationTimeoutError("half done")]

    def fail(operation: Operation) -> None:
        raise errors.pop(0)

    backend_does(pg, fail)
    pg.backend.frees_tensors = True
    refused, failed = torch.ones(2), torch.ones(2)
    with pytest.raises(InvalidUsageError):
        pg.all_reduce(refused, async_op=async_op).wait()
    with pytest.raises(OperationTimeoutError):
        pg.all_reduce(failed, async_op=async_op).wait()
    assert refused.tolist() == [1, 1]
    assert failed.isnan().all()


@pytest.mark.parametrize("name", ["all_reduce", "send"])
def test_an_interrupt_breaks_the_group(pg: ProcessGroup, name: str) -> None:
    def interrupt(operation: Operation) -> None:
        raise KeyboardInterrupt

    backend_does(pg, interrupt)
    arguments = () if name == "all_reduce" else (0,)
    with pytest.raises(KeyboardInterrupt):
        getattr(pg, name)(torch.ones(2), *arguments)
    assert pg._runner.queue.idle
    with pytest.raises(GroupAbortedError, match="interrupted by KeyboardInterrupt"):
        getattr(pg, name)(torch.ones(2), *arguments)


def test_an_instrument_that_is_interrupted_leaves_the_queue(pg: ProcessGroup) -> None:
    class Interrupted:
        def group_opened(self, group: Any) -> None: ...
        def group_closed(self, group: Any) -> None: ...
        def operation_started(self, operation: Operation) -> None:
            raise KeyboardInterrupt

        def operation_finished(self, operation: Operation) -> None: ...

    remove = add_instrument(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        pg.all_reduce(torch.ones(2))
    remove()
    assert pg._runner.queue.idle
    assert pg.all_reduce(torch.ones(2)).operation.seq == 2


@pytest.mark.parametrize("name", ["all_reduce", "send"])
def test_ctrl_c_waits_in_what_is_called_in_an_operation(pg: ProcessGroup, name: str) -> None:
    went_on: list[bool] = []

    def press(operation: Operation) -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    backend_does(pg, press)
    arguments = () if name == "all_reduce" else (0,)
    ctrl_c.take_over()
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(pg, name)(torch.ones(2), *arguments)
            time.sleep(5)
    finally:
        ctrl_c.give_back()
    assert went_on == [True]
    assert pg._runner.queue.idle
    assert pg._runner.fault is None


def test_what_the_backend_completes_later_is_waited_for(pg: ProcessGroup) -> None:
    later: Future[None] = Future()
    backend_does(pg, lambda operation: later)
    timer = threading.Timer(0.05, later.set_result, [None])
    timer.start()
    work = pg.all_reduce(torch.ones(2))
    assert later.done()
    assert work.is_success()
    assert work.operation.state is State.COMPLETED
    timer.join()


def test_an_abort_from_inside_is_cleaned_up_by_the_last_to_leave(pg: ProcessGroup) -> None:
    ended: list[bool] = []
    backend_does(pg, lambda operation: pg.abort())
    pg.backend.shutdown = lambda: ended.append(pg._runner.queue.idle)  # type: ignore[method-assign]  # in place of the method
    pg.all_reduce(torch.ones(2))
    for thread in threading.enumerate():
        if thread.name.startswith("dist2-abort"):
            thread.join(5)
    assert ended == [True]
    with pytest.raises(GroupAbortedError):
        pg.all_reduce(torch.ones(2))


def test_calls_inside_a_call_queue_behind_it(pg: ProcessGroup) -> None:
    inner: list[Work] = []

    def nest(operation: Operation) -> None:
        if not inner:
            inner.append(pg.barrier(async_op=True))

    backend_does(pg, nest)
    outer = pg.all_reduce(torch.ones(2))
    inner[0].wait()
    assert (outer.operation.seq, inner[0].operation.seq) == (1, 2)


def test_limits_of_any_kind_are_the_same_on_both_ways(pg: ProcessGroup) -> None:
    for limit, seconds in ((0.25, 0.25), (timedelta(seconds=1.5), 1.5), (1e12, 1e9), (float("inf"), 1e9)):
        assert pg.all_reduce(torch.ones(2), timeout=limit).operation.timeout_s == seconds
    for wrong in (float("nan"), 0.0, -1.0, True):
        with pytest.raises(InvalidUsageError, match="timeout"):
            pg.all_reduce(torch.ones(2), timeout=wrong)
    assert pg.barrier().operation.seq == 5  # a refused call has no number


def test_limits_are_those_of_the_call_or_the_group(pg: ProcessGroup) -> None:
    pg.set_timeout(7)
    assert pg.all_reduce(torch.ones(2)).operation.timeout_s == 7
    assert pg.all_reduce(torch.ones(2), timeout=3).operation.timeout_s == 3
    assert pg.send(torch.ones(2), 0).operation.timeout_s == 7
    assert pg.send(torch.ones(2), 0, timeout=3).operation.timeout_s == 3
    with pytest.raises(InvalidUsageError, match="timeout"):
        pg.all_reduce(torch.ones(2), timeout="soon")

    def time_out(operation: Operation) -> None:
        raise OperationTimeoutError("nobody came")

    with pg.coalescing() as batch:
        collected = pg.all_reduce(torch.ones(2))
        assert not collected.is_completed()
    batch.wait()
    backend_does(pg, time_out)
    with pytest.raises(OperationTimeoutError, match=r"#4 at .*limit 7 s"):
        pg.all_reduce(torch.ones(3))


def test_works_and_records_are_let_go_without_the_garbage_collector(pg: ProcessGroup) -> None:
    gc.disable()
    try:
        tensor = torch.ones(2)
        work = pg.all_reduce(tensor)
        gone = weakref.ref(work), weakref.ref(tensor)
        del work, tensor
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_a_group_is_let_go(pg: ProcessGroup) -> None:
    pg.all_reduce(torch.ones(2))
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1, name="short") as other:
        other.all_reduce(torch.ones(2))
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_many_calls_leak_nothing() -> None:
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        tensor = torch.ones(2)

        def calls(count: int) -> None:
            for _ in range(count):
                pg.all_reduce(tensor)
                pg.broadcast(tensor, 0)
                pg.send(tensor, 0)
                pg.barrier(async_op=True).wait()

        calls(2000)  # the flight recorder is full now, and keeps as many records as before
        watched = [tensor, calls.__code__, pg, True, False, None, Operation, Work, OperationRunner]
        before = [sys.getrefcount(each) for each in watched]
        calls(5000)
        after = [sys.getrefcount(each) for each in watched]
    assert all(abs(new - old) < 200 for new, old in zip(after, before, strict=True))


@needs("exchange")
@pytest.mark.parametrize("name", ["all_reduce", "send"])
def test_where_tensors_lie_is_known_while_a_call_is_under_way(name: str) -> None:
    known: list[bool] = []

    def note(operation: Operation) -> None:
        known.append(operation.has_places)
        if len(known) == 3:
            raise InvalidUsageError("not this one")

    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        backend_does(pg, note)
        arguments, tensor = () if name == "all_reduce" else (0,), torch.ones(2)
        before = sys.getrefcount(tensor)
        getattr(pg, name)(tensor, *arguments)  # the method in Python makes the plan
        ended = [getattr(pg, name)(tensor, *arguments).operation]
        assert sys.getrefcount(tensor) == before
        with pytest.raises(InvalidUsageError) as caught:
            getattr(pg, name)(tensor, *arguments)
        del caught
        assert not known[0] and all(known[1:])
        assert [each.has_places for each in ended] == [False]
        if name == "all_reduce":
            getattr(pg, name)(tensor, async_op=True).wait()
            assert not known[3], "the call is over when an asynchronous operation has its turn"
