# cython: annotation_typing=False
"""`Work`: one operation that was called, to wait for and to ask."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from dist2.errors import GroupAbortedError, OperationTimeoutError
from dist2.operation import awaiting
from dist2.operation.cpp_work import CppWork, whole
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.runtime import process
from dist2.runtime.built import check_built
from dist2.runtime.completion import Completion
from dist2.runtime.deadline import FOREVER_NS, PAST_NS, deadline_in, seconds
from dist2.runtime.torch_versions import BINDING

check_built(__name__, __file__)

_NO_LIMIT = timedelta(0)

_OP_TYPES = {
    OpKind.ALL_REDUCE: BINDING.OpType.ALLREDUCE,
    OpKind.ALL_REDUCE_COALESCED: BINDING.OpType.ALLREDUCE_COALESCED,
    OpKind.BROADCAST: BINDING.OpType.BROADCAST,
    OpKind.REDUCE: BINDING.OpType.REDUCE,
    OpKind.ALL_GATHER: BINDING.OpType.ALLGATHER,
    OpKind.ALL_GATHER_V: BINDING.OpType.ALLGATHER,
    OpKind.ALL_GATHER_SINGLE: BINDING.OpType._ALLGATHER_BASE,
    OpKind.ALL_GATHER_SINGLE_COALESCED: BINDING.OpType.ALLGATHER_COALESCED,
    OpKind.REDUCE_SCATTER: BINDING.OpType.REDUCE_SCATTER,
    OpKind.REDUCE_SCATTER_V: BINDING.OpType.REDUCE_SCATTER,
    OpKind.REDUCE_SCATTER_SINGLE: BINDING.OpType._REDUCE_SCATTER_BASE,
    OpKind.REDUCE_SCATTER_SINGLE_COALESCED: BINDING.OpType.REDUCE_SCATTER,
    OpKind.GATHER: BINDING.OpType.GATHER,
    OpKind.SCATTER: BINDING.OpType.SCATTER,
    OpKind.ALL_TO_ALL: BINDING.OpType.ALLTOALL,
    OpKind.ALL_TO_ALL_SINGLE: BINDING.OpType.ALLTOALL_BASE,
    OpKind.BARRIER: BINDING.OpType.BARRIER,
    OpKind.SEND: BINDING.OpType.SEND,
    OpKind.RECV: BINDING.OpType.RECV,
}


class Work:
    """An operation in flight or done.

    A synchronous call returns one that is complete. An asynchronous one completes in the background
    also if no thread waits; its tensors must be left alone until then.

    Attributes:
        operation: The record of the call: signature, sequence number, times, error.
        outputs: The tensors it writes.
        helper: Runs the operation in the waiting thread, until it is done or a deadline passes. A deadline of
            `PAST_NS` means that no thread will wait for it.

    Examples:
        >>> tensor = torch.ones(2)
        >>> work = pg.all_reduce(tensor, async_op=True)
        >>> work.wait(timeout=5)
        True
        >>> tensor
        tensor([2., 2.])

    In a coroutine, ``tensors = await pg.all_reduce(tensor, async_op=True)`` waits without blocking the event
    loop of asyncio or trio.
    """

    helper: Callable[[int], None] | None
    _deliveries: tuple[_Delivery, ...]

    def __init__(
        self,
        operation: Operation,
        outputs: Sequence[torch.Tensor],
        pending: Future[None] | Completion | None = None,
    ) -> None:
        self.operation = operation
        self.outputs = outputs
        self._pending = pending
        if pending is not None:
            self._process = process.pid
            self._deliveries = ()

    @property  # type: ignore[misc]  # the attribute can be set in other objects
    def __class__(self) -> Any:
        return CppWork

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_pybind11_"):  # C++ would get the half of an object that is freed at once
            raise AttributeError(name)
        return getattr(whole(self), name)

    def __repr__(self) -> str:
        return f"<Work {self.operation.describe()} {self.operation.state.value}>"

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation is complete.

        Args:
            timeout: Give up waiting after this long; None (or zero, as c10d has it) waits as long as the
                operation's own limit allows. Giving up does not cancel the operation.

        Returns:
            True.

        Raises:
            OperationTimeoutError: The wait or the operation passed its limit.
            GroupAbortedError: The operation was called by the parent, before this process was forked.
            Dist2Error: The operation's failure.

        Examples:
            >>> work = pg.all_reduce(torch.ones(2), async_op=True)
            >>> work.wait(timeout=5)
            True
        """
        pending = self._pending
        if pending is None:
            if self.operation.error is not None:
                raise self.operation.error
            return True
        if process.pid != self._process:  # no thread would ever complete it here
            raise self._of_the_parent()
        limit_s = None if timeout in (None, 0, _NO_LIMIT) else seconds(timeout)
        end_ns = FOREVER_NS if limit_s is None else deadline_in(limit_s)
        if not awaiting.wait_in_thread(self.operation, pending, self.helper, end_ns):
            signature = self.operation.signature
            message = (
                f"waited {limit_s} s for {self.operation.describe()}, which is still running "
                f"within its own limit of {self.operation.timeout_s:.3g} s"
            )
            raise OperationTimeoutError(
                message,
                timeout_s=limit_s,
                group=signature.group.name,
                op=signature.kind.value,
                seq=self.operation.seq,
                rank=signature.group.rank,
            )
        for delivery in self._deliveries:
            delivery.complete()
        pending.result()
        return True

    def _of_the_parent(self) -> GroupAbortedError:
        signature = self.operation.signature
        return GroupAbortedError(
            f"{self.operation.describe()} in group {signature.group.name!r} belongs to the parent process, "
            "which called it before this one was forked",
            group=signature.group.name,
            op=signature.kind.value,
            seq=self.operation.seq,
            rank=signature.group.rank,
        )

    def is_completed(self) -> bool:
        """Whether it ended, well or badly.

        Examples:
            >>> pg.all_reduce(torch.ones(2)).is_completed()
            True
        """
        return self._pending is None or self._pending.done()

    def is_success(self) -> bool:
        """Whether it ended well.

        Examples:
            >>> pg.all_reduce(torch.ones(2)).is_success()
            True
        """
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the exception that it failed with; None if it succeeded or is not done.

        Examples:
            >>> pg.all_reduce(torch.ones(2)).exception() is None
            True
        """
        if self._pending is None or not self._pending.done():
            return self.operation.error
        return self._pending.exception()

    def synchronize(self) -> None:
        """Wait, as `wait` does: on a CPU there is no stream to order behind.

        Examples:
            >>> pg.all_reduce(torch.ones(2), async_op=True).synchronize()
        """
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as `wait` does: on a CPU the caller is the stream.

        Examples:
            >>> pg.all_reduce(torch.ones(2), async_op=True).block_current_stream()
        """
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors, after waiting for them.

        Examples:
            >>> pg.all_reduce(torch.ones(2), async_op=True).result()
            [tensor([2., 2.])]
        """
        self.wait()
        return list(self.outputs)

    def __await__(self) -> Generator[Any, Any, list[torch.Tensor]]:
        """Wait in a task of asyncio or trio; return the output tensors, or raise the operation's error.

        A task that is cancelled, or whose `asyncio.timeout` passes, stops waiting. The operation goes on: it
        keeps its tensors until it is complete, the group stays usable, and the Work may be awaited again.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> list[torch.Tensor]:
        if self._pending is not None and not self._pending.done():
            if self.helper is not None:
                self.helper(PAST_NS)  # no thread waits for this Work
            await awaiting.completed(self.add_done_callback)
        return self.result()

    def source_rank(self) -> int:
        """Return the group rank that a receive got its message from.

        Raises:
            OperationTimeoutError, Dist2Error: As `wait`.

        Examples:
            >>> works = pg.isend(torch.ones(1), 1 - pg.rank()), pg.irecv(torch.empty(1))
            >>> all(work.wait() for work in works)
            True
            >>> works[1].source_rank() == 1 - pg.rank()
            True
        """
        self.wait()
        return self.operation.source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a torch future of the output tensors.

        It fails by a callback that raises: torch's DDP crashes on a future that was failed by
        ``set_exception``, or that carries an empty list.

        Examples:
            >>> pg.all_reduce(torch.ones(2), async_op=True).get_future().wait()
            [tensor([2., 2.])]
        """
        done: torch.futures.Future[None] = self._new_future()
        outputs = list(self.outputs)

        def deliver(_: torch.futures.Future[None]) -> list[torch.Tensor]:
            error = self.exception()  # of a batch: of any of its operations
            if error is not None:
                raise error
            return outputs

        delivered = done.then(deliver)
        self._deliver(_Delivery(lambda: done.set_result(None), delivered))
        helper = self.helper
        if helper is not None:
            helper(PAST_NS)  # the caller waits for the future, not for this Work, as torch's DDP does
        return delivered

    def _new_future(self) -> torch.futures.Future[Any]:
        """Return a future that may carry the outputs: torch refuses tensors of GPUs that it does not know."""
        devices = {tensor.device for tensor in self.outputs if tensor.is_cuda}
        return torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return a torch future of c10d's WorkResult: 0 for success, 3 for an error, 1 for a timeout.

        Examples:
            >>> pg.all_reduce(torch.ones(2), async_op=True).get_future_result().wait()
            0
        """
        result: torch.futures.Future[int] = torch.futures.Future()

        def tell() -> None:
            error = self.exception()
            result.set_result(0 if error is None else 1 if isinstance(error, OperationTimeoutError) else 3)

        self._deliver(_Delivery(tell, result))
        return result

    def _deliver(self, delivery: _Delivery) -> None:
        """Have a future be complete once the operation has ended, and before `wait` returns."""
        if self._pending is not None:
            self._deliveries = (*self._deliveries, delivery)
        self.add_done_callback(delivery.complete)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back when it ended: at once if it has, else from the thread that completes it.

        Args:
            callback: Called without arguments.

        Examples:
            >>> seen = []
            >>> work = pg.all_reduce(torch.ones(2), async_op=True)
            >>> work.add_done_callback(lambda: seen.append("done"))
            >>> work.wait()
            True
            >>> seen
            ['done']
        """
        if self._pending is None:
            callback()
        else:
            self._pending.add_done_callback(lambda _: callback())

    @property
    def timeout(self) -> timedelta:
        """The limit of the operation, as torch has it since 2.14.

        Examples:
            >>> pg.barrier(timeout=2.5).timeout
            datetime.timedelta(seconds=2, microseconds=500000)
        """
        return timedelta(seconds=self.operation.timeout_s)

    def _get_duration(self) -> float:
        """Return how long it ran, in milliseconds (as c10d has it)."""
        return (self.operation.finished_ns - self.operation.started_ns) / 1e6

    def _get_op_type(self) -> int:
        return int(_OP_TYPES[self.operation.signature.kind])


def completed(operation: Operation, outputs: Sequence[torch.Tensor]) -> Work:
    """Return the Work of a complete operation."""
    work: Work = Work.__new__(Work)
    work.operation = operation
    work.outputs = outputs
    return work


class _Delivery:
    """The completion of a future: by the thread that ends the operation, or by one that waited for it.

    Args:
        action: Completes it.
        future: The future.
    """

    __slots__ = ("_action", "_future")

    def __init__(self, action: Callable[[], None], future: torch.futures.Future[Any]) -> None:
        self._action = [action]
        self._future = future

    def complete(self) -> None:
        """Return when the future is complete; its callbacks may still run, in another thread."""
        try:
            action = self._action.pop()
        except IndexError:  # another thread has begun to
            with suppress(Exception):  # the operation's error
                self._future.wait()
        else:
            action()
