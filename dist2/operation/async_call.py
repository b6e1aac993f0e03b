# cython: annotation_typing=False
"""`AsyncCall`: an operation that is not complete when its call returns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from cython.cimports.dist2.operation.interpreter import monotonic_ns

from dist2.operation.execution import Helped, StreamOrdered, Tensors
from dist2.operation.instruments import Dispatch, dispatch
from dist2.operation.plan_cache import Plan
from dist2.operation.record import Operation
from dist2.operation.stream_work import StreamWork
from dist2.operation.work import Work
from dist2.runtime.built import check_built
from dist2.runtime.completion import Completion
from dist2.runtime.deadline import FOREVER_NS, PAST_NS
from dist2.runtime.signals import await_end

if TYPE_CHECKING:
    from dist2.operation.runner import OperationRunner

check_built(__name__, __file__)

DISPATCH: Dispatch = dispatch


class AsyncCall:
    """An operation that is not complete when its call returns.

    It has three roles. `start` is a job of the queue, which runs once. `help_out` is the helper of its Work:
    it runs queued jobs until this one is done. And it is the completion that its Work waits for, as
    `Completion`: one of these is made when a thread has to sleep.
    """

    _work: Any
    _plan: Any
    _inputs: Any
    _outputs: Any
    _error: BaseException | None
    _done: bool
    _completion: Completion | None
    _ends_ns: int

    def __init__(
        self, runner: OperationRunner, plan: Plan, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._operation = operation
        self._inputs = inputs
        self._outputs = outputs
        self._ends_ns = FOREVER_NS  # no thread helps before it is queued

    def start(self) -> BaseException | None:
        """Run the operation; threads that wait for its Work get the outcome.

        Returns:
            An exception that concerns the calling thread as well: Ctrl-C, say.
        """
        runner, operation, plan = self._runner, self._operation, self._plan
        if self._done or plan is None:
            return None
        if runner.state.fault is not None:
            self.fail(runner.refusal(runner.state.fault))
            return None
        DISPATCH.started(operation)
        operation.started_ns = monotonic_ns()
        try:
            pending = plan.execute(operation, self._inputs, self._outputs)
        except BaseException as error:  # noqa: BLE001 - it is delivered to those that wait
            self.fail(error)
            return None if isinstance(error, Exception) else error
        if pending is None:
            self.settle(None)
        else:
            self.follow(pending)
        return None

    def follow(self, pending: Future[None] | Helped) -> None:
        """Settle the operation when the backend has completed it."""
        work = self._work
        if isinstance(pending, Helped):
            work.helper = pending.help
        if isinstance(pending, StreamOrdered) and isinstance(work, StreamWork):
            work.ordered = pending
        pending.add_done_callback(self.ended)

    def ended(self, pending: Future[None] | Helped) -> None:
        """Settle the operation, which the backend has completed."""
        error = pending.exception()
        self._inputs = ()  # the backend may have written the outputs by now, and nothing else
        if error is None:
            self.settle(None)
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Give the error to those that wait."""
        try:
            self._runner._poison(self._operation, error, self._inputs, self._outputs)
        finally:
            self.settle(error)

    def settle(self, error: BaseException | None) -> None:
        """Complete the operation: first its record, then those that wait for it."""
        if error is None:
            self._runner._finished(self._operation)
            self._end(None)
        else:
            try:
                error = self._runner._fail(self._operation, error)
            finally:
                self._end(error)

    def forget(self) -> None:
        """Let go of the Work, which would keep this and the tensors alive until a collection."""
        work = self._work
        if work is not None:
            work.helper = None
            self._runner._in_flight.discard(work)
        self._work = self._plan = self._inputs = self._outputs = None

    def returned(self, work: Work) -> Work:
        """Return the Work, which this may have let go of, as the caller asked: pending, or complete."""
        if not self._operation.is_async:
            helper = work.helper
            if helper is not None:
                helper(FOREVER_NS)
            await_end(self, FOREVER_NS)
            self.result()
        return work

    def help_out(self, until_ns: int) -> None:
        """Run queued jobs until this one is done, if the caller can wait until the timeouts of all."""
        if until_ns == PAST_NS:
            self._runner.queue.hurry()
        elif until_ns >= self._ends_ns and not self._done:
            self._runner.queue.help(self.done)

    # The completion of its Work

    def _end(self, error: BaseException | None) -> None:
        if self._done:
            raise RuntimeError("it is done already")
        self._error, self._done = error, True
        try:
            if self._completion is not None:
                if error is None:
                    self._completion.set_result(None)
                else:
                    self._completion.set_exception(error)
        finally:
            self.forget()

    def done(self) -> bool:
        """Whether it is."""
        return bool(self._done)

    def set_result(self, result: None) -> None:
        """Be done."""
        self._end(None)

    def set_exception(self, error: BaseException) -> None:
        """Be done, with an error."""
        self._end(error)

    def _sleeping(self) -> Completion | None:
        """Return what threads sleep on; None if it is done."""
        if self._completion is None and not self._done:
            made = Completion()
            if self._completion is None and not self._done:  # another thread may have had its turn
                self._completion = made
        return None if self._done else self._completion

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until it is done; return the error.

        Raises:
            TimeoutError: It is not done after this many seconds.
        """
        sleeping = self._sleeping()
        return self._error if sleeping is None else sleeping.exception(timeout)

    def result(self) -> None:
        """Wait until it is done; raise the error."""
        error = self.exception()
        if error is not None:
            try:
                raise error
            finally:
                del error  # a traceback that leads to itself is only found by a collection

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call back when it is done: at once if it is, else from the thread that ends it."""
        sleeping = self._sleeping()
        if sleeping is None:
            callback(self)
        else:
            sleeping.add_done_callback(callback)
