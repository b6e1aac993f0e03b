"""`Work`: waiting, asking, futures, and outcomes of operations that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from support.fake_groups import info_of, metas
from support.ranks import TENANTS, run_ranks
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]  # not in torch's stubs

from dist2 import Dist2Error, InvalidUsageError, OperationTimeoutError, ProcessGroup, Work
from dist2.operation.cpp_work import typed, whole
from dist2.operation.execution import StreamOrdered
from dist2.operation.kinds import SUM, OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.operation.stream_work import StreamWork
from dist2.operation.work import _OP_TYPES
from dist2.runtime.deadline import PAST_NS

T = TypeVar("T")


def operation(kind: OpKind = OpKind.ALL_REDUCE) -> Operation:
    return Operation(Signature(kind, info_of(), metas([2]), metas([2]), SUM), 7, 1_000, 3_000_001_000, True)


def pending() -> tuple[Work, Future[None], torch.Tensor]:
    tensor, done = torch.ones(2), Future[None]()
    return Work(operation(), [tensor], done), done, tensor


def fail(work: Work, done: Future[None], error: BaseException) -> None:
    work.operation.error = error
    done.set_exception(error)


def test_a_complete_work() -> None:
    done = operation()
    done.started_ns, done.finished_ns = 2_000, 4_002_000
    tensor = torch.ones(2)
    work = Work(done, [tensor])
    assert work.wait() and work.wait(timedelta(seconds=1)) and work.wait(0)
    assert work.is_completed() and work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert work._get_duration() == pytest.approx(4.0)
    assert work._get_op_type() == int(OpType.ALLREDUCE)
    assert work.get_future().wait()[0] is tensor
    assert work.get_future_result().wait() == 0
    work.synchronize()
    work.block_current_stream()
    assert "all_reduce(float32[2], op=sum) #7 completed" in repr(work)


class Settling(StreamOrdered):
    """An operation that another thread has found over, and has not told the Work yet."""

    def __init__(self, error: BaseException | None) -> None:
        self.over = True
        self._error = error

    def poll(self) -> None:
        return None

    def exception(self) -> BaseException | None:
        return self._error


@pytest.mark.parametrize("error", [None, Dist2Error("the device failed")], ids=["done", "failed"])
def test_an_operation_on_a_stream_is_complete_once_any_thread_knows(error: Dist2Error | None) -> None:
    done = Future[None]()
    work = StreamWork(operation(), [torch.ones(2)], done)
    work.ordered = Settling(error)
    assert work.is_completed()
    assert work.exception() is error
    assert work.is_success() == (error is None)


def test_who_takes_a_future_will_not_wait() -> None:
    work, done, tensor = pending()
    told: list[int] = []
    work.helper = told.append
    future = work.get_future()
    assert told == [PAST_NS]
    done.set_result(None)
    assert future.wait()[0] is tensor


@pytest.mark.parametrize("timeout", [0.02, timedelta(milliseconds=20)])
def test_giving_up_waiting_does_not_end_the_operation(timeout: float | timedelta) -> None:
    work, done, _ = pending()
    with pytest.raises(
        OperationTimeoutError, match=r"waited 0.02 s for all_reduce.* within its own limit of 3 s"
    ):
        work.wait(timeout)
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    done.set_result(None)
    assert work.wait(timeout)


@pytest.mark.parametrize("unlimited", [None, 0, timedelta(0)])
def test_no_limit_waits_for_the_operation(unlimited: timedelta | None) -> None:
    work, done, _ = pending()
    timer = threading.Timer(0.05, done.set_result, [None])
    timer.start()
    assert work.wait(unlimited)
    timer.join()


@pytest.mark.parametrize("wrong", [-1, "soon", timedelta(seconds=-1)])
def test_a_bad_limit(wrong: object) -> None:
    work, done, _ = pending()
    with pytest.raises(InvalidUsageError, match="timeout"):
        work.wait(wrong)
    done.set_result(None)


def test_a_failed_work_raises_its_error_each_time() -> None:
    work, done, _ = pending()
    future = work.get_future()
    error = OperationTimeoutError("rank(s) 1 did not come", missing=[1])
    fail(work, done, error)
    for _ in range(2):
        with pytest.raises(OperationTimeoutError) as failure:
            work.wait(1)
        assert failure.value is error
    assert work.is_completed() and not work.is_success()
    assert work.exception() is error
    with pytest.raises(OperationTimeoutError):
        work.result()
    with pytest.raises(RuntimeError, match="did not come"):
        future.wait()
    assert work.get_future_result().wait() == 1
    other, done, _ = pending()
    fail(other, done, Dist2Error("no"))
    assert other.get_future_result().wait() == 3


def test_futures_are_complete_when_a_wait_returns() -> None:
    """Though the thread that ends the operation has not come to them: it is in an earlier callback."""
    work, done, tensor = pending()
    waited = threading.Event()
    work.add_done_callback(lambda: waited.wait(10) or None)
    future, result = work.get_future(), work.get_future_result()
    other = threading.Thread(target=done.set_result, args=[None])
    other.start()
    try:
        assert work.wait()
        assert future.value()[0] is tensor
        assert result.value() == 0
    finally:
        waited.set()
        other.join()


def test_a_wait_in_a_callback_of_a_future_returns() -> None:
    work, done, _ = pending()
    called: list[bool] = []
    work.get_future().then(lambda _: called.append(work.wait()))
    done.set_result(None)
    assert called == [True]


def test_a_future_is_chained() -> None:
    work, done, tensor = pending()
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    called: list[bool] = []
    work.add_done_callback(lambda: called.append(True))
    assert not doubled.done() and not called
    done.set_result(None)
    assert torch.equal(doubled.wait(), tensor * 2)
    work.add_done_callback(lambda: called.append(True))
    assert called == [True, True]


def test_every_operation_has_a_type_of_c10d() -> None:
    assert set(_OP_TYPES) == set(OpKind)


def test_a_batch_of_which_one_fails_fails() -> None:
    """Also if its last operation succeeds: any thread that waits or chains gets the error."""

    def body(pg: ProcessGroup) -> None:
        cpu = torch.device("cpu")
        pg._start_coalescing(cpu)
        nothing = pg.recv(torch.ones(1), pg.rank(), 4, timeout=0.1)  # no rank sends it
        self_sent = pg.send(torch.ones(1), pg.rank(), 3)
        work = pg._end_coalescing(cpu)
        future = work.get_future()
        with pytest.raises(OperationTimeoutError):
            work.wait()
        with pytest.raises(RuntimeError, match="recv"):
            future.wait()
        assert isinstance(work.exception(), OperationTimeoutError)
        assert work.exception() is nothing.exception()
        assert self_sent.is_completed()
        with pytest.raises(OperationTimeoutError, match="cannot be used any more"):
            pg.barrier()

    run_ranks(1, body, TENANTS[0])


def call(ask: Callable[[], T]) -> T:
    """Call as C++ does: this code does not contain the name of the called method."""
    return ask()


def test_cpp_gets_a_future_that_knows_its_type_and_python_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []
    monkeypatch.setattr("dist2.operation.cpp_work.typed", lambda *args: made.append(typed(*args)) or made[-1])
    half = torch.ones(2, dtype=torch.float16)
    done = Future[None]()
    work = Work(operation(), [half], done)
    of_cpp = whole(work)
    of_cpp.get_future()
    assert not made
    asked = call(of_cpp.get_future)
    assert made == [asked]
    assert not asked.done()
    done.set_result(None)
    assert asked.wait()[0] is half


def test_a_future_that_knows_its_type_fails_with_the_operation() -> None:
    work, done, _ = pending()
    work.outputs = [torch.ones(1, dtype=torch.float16)]
    asked = call(whole(work).get_future)
    fail(work, done, Dist2Error("it broke"))
    with pytest.raises(RuntimeError, match="it broke"):
        asked.wait()
