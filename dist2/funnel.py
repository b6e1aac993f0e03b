"""The one way every operation goes: look up the plan, number, tell instruments, run, tell again.

`Funnel` is the lowest layer of `dist2.group.ProcessGroup`; the operations themselves are in
``collectives.py`` and ``point_to_point.py``. This is the hot path: what can be known once a call
signature is computed on the first call of it and kept in its `Plan`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import get_ident
from time import monotonic_ns

import attrs
import structlog
import torch
from torch.distributed import ProcessGroup as TorchProcessGroup

from dist2.backends.base import Backend, Execute, GroupSpec, Helped
from dist2.clock import FOREVER_NS, deadline_in, seconds
from dist2.coalescing import Batch
from dist2.ctrl_c import await_end
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.hooks import dispatch
from dist2.lane import Lane
from dist2.operation import GroupInfo, Operation, Signature
from dist2.ops import OpKind
from dist2.spoiling import spoil
from dist2.work import Work

Tensors = Sequence[torch.Tensor]
Timeout = timedelta | float | None

MAX_PLANS = 4096
"""Plans kept a group; programs with ever-changing shapes start over when it is full."""

_HERE = str(Path(__file__).parent)

log = structlog.get_logger("dist2.group")


@attrs.frozen(eq=False)
class Plan:
    """What is known about all calls of one signature.

    Attributes:
        signature: The call.
        execute: Runs it.
    """

    signature: Signature
    execute: Execute


class Funnel(TorchProcessGroup):
    """A group's identity, its state, and the path of every operation.

    Attributes:
        info: Who the group is.
        backend: What moves its tensors.
        p2p_seq: Number of the point-to-point operation issued last; the first is 1.
    """

    def __init__(self, spec: GroupSpec, backend: Backend) -> None:
        super().__init__(spec.info.rank, spec.info.world_size)  # type: ignore[call-arg]  # stubs lack it
        self.spec = spec
        self.backend = backend
        self.info: GroupInfo = spec.info
        self._timeout_ns = int(spec.timeout_s * 1e9)
        self.p2p_seq = 0
        self._plans: dict[Hashable, Plan] = {}
        self._lane = Lane(spec.info.name)
        self._p2p_numbers = itertools.count(1)
        self._fault: Dist2Error | None = None
        self._aborted = False
        self._closed = False
        self._batches: dict[int, Batch] = {}  # by the thread that opened it
        self._hooks: tuple[Callable[[Operation], None], ...] = ()
        self._in_flight: set[Work] = set()
        self._in_flight_lock = threading.Lock()

    @property
    def timeout_s(self) -> float:
        """The limit of operations that name none, in seconds."""
        return self._timeout_ns / 1e9

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the limit of operations that name none."""
        self._timeout_ns = int(seconds(timeout) * 1e9)

    # Plans

    def _add_plan(self, key: Hashable, signature: Signature) -> Plan:
        """Have the backend prepare a signature, and keep the result for the next call like it."""
        plan = Plan(signature, self.backend.plan(signature))
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        if key is not None:
            self._plans[key] = plan
        return plan

    def _known(self, key: Hashable) -> Plan | None:
        """Return the plan of a call made before; None also where an argument cannot even be hashed."""
        try:
            return self._plans.get(key)
        except TypeError:
            return None

    # Operations

    def _run(self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout) -> Work:
        """Run or issue a collective."""
        operation = self._begin(plan.signature, async_op, timeout)
        if self._batches and (batch := self._batches.get(get_ident())) is not None:
            return self._defer(batch, self._issue, plan, operation, inputs, outputs)
        lane = self._lane
        if (async_op and not self.backend.natively_async) or not (seq := lane.enter()):
            work, done = self._pending(operation, outputs)
            self._issue(plan, work, done, inputs, outputs)
            return self._returned(work, done)
        operation.seq = seq
        try:
            pending = self._execute(plan, operation, inputs, outputs)
        finally:
            lane.leave()
            if self._aborted:
                self._release()
        return self._work(operation, outputs, pending)

    def _run_p2p(
        self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout
    ) -> Work:
        """Run or issue a point-to-point operation: beside the lane, never behind a collective."""
        operation = self._begin(plan.signature, async_op, timeout)
        if self._batches and (batch := self._batches.get(get_ident())) is not None:
            return self._defer(batch, self._start_p2p, plan, operation, inputs, outputs)
        self._number_p2p(operation)
        lane = self._lane
        lane.enter_beside()
        try:
            pending = self._execute(plan, operation, inputs, outputs)
        finally:
            lane.leave_beside()
            if self._aborted:
                self._release()
        return self._work(operation, outputs, pending)

    def _begin(self, signature: Signature, async_op: bool, timeout: Timeout) -> Operation:
        """Return the record of a new call, unless the group refuses calls."""
        if self._fault is not None:
            raise self._refusal(self._fault)
        limit_ns = self._timeout_ns if timeout is None else int(seconds(timeout) * 1e9)
        return Operation.begun(signature, limit_ns, async_op, _HERE)

    def _execute(
        self, plan: Plan, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | Helped | None:
        """Hand an operation to the backend; where it completes here, tell what became of it."""
        dispatch.started(operation)
        operation.started_ns = operation.created_ns
        try:
            pending = plan.execute(operation, inputs, outputs)
        except BaseException as error:  # noqa: BLE001 - recorded and raised again
            self._spoil(operation, error, inputs, outputs)
            raise self._failed(operation, error) from error.__cause__
        if pending is None:
            self._finished(operation)
        return pending

    def _work(self, operation: Operation, outputs: Tensors, pending: Future[None] | Helped | None) -> Work:
        """Return the Work of an operation that the backend completed, or completes later."""
        if pending is None:
            return Work(operation, outputs)
        work, done = self._pending(operation, outputs)
        self._follow(pending, work, done)
        return self._returned(work, done)

    # Operations that complete later

    def _pending(self, operation: Operation, outputs: Tensors) -> tuple[Work, Future[None]]:
        """Return a Work and what completes it; it is held until then, as torch's C++ may hold only half."""
        done: Future[None] = Future()
        work = Work(operation, outputs, done)
        with self._in_flight_lock:
            self._in_flight.add(work)
        return work, done

    def queued(self) -> list[Operation]:
        """Return the operations that were issued and wait for their turn, oldest first."""
        with self._in_flight_lock:
            issued = [work.operation for work in self._in_flight]
        waiting = [each for each in issued if not each.started_ns and not each.finished_ns]
        return sorted(waiting, key=lambda operation: operation.created_ns)

    def _follow(self, pending: Future[None] | Helped, work: Work, done: Future[None]) -> None:
        """Settle an operation when the backend has completed it."""
        if isinstance(pending, Helped):
            work.helper = pending.help

        def ended(pending: Future[None] | Helped) -> None:
            error = pending.exception()
            if error is not None:
                self._spoil(work.operation, error, (), work.outputs)
            self._settle(work, done, error)

        pending.add_done_callback(ended)

    @staticmethod
    def _returned(work: Work, done: Future[None]) -> Work:
        """Return a Work as its caller asked for it: pending, or complete."""
        if not work.operation.is_async:
            await_end(done, FOREVER_NS)
            done.result()
        return work

    def _issue(self, plan: Plan, work: Work, done: Future[None], inputs: Tensors, outputs: Tensors) -> None:
        """Put a collective on the lane."""
        self._lane.put(work.operation, lambda: self._start(plan, work, done, inputs, outputs), self._left)

    def _left(self) -> None:
        """The lane's thread has finished a job."""
        if self._aborted:
            self._release()

    def _start_p2p(
        self, plan: Plan, work: Work, done: Future[None], inputs: Tensors, outputs: Tensors
    ) -> None:
        """Start a point-to-point operation that was collected in a batch."""
        self._number_p2p(work.operation)
        self._start(plan, work, done, inputs, outputs)

    def _number_p2p(self, operation: Operation) -> None:
        self.p2p_seq = operation.seq = next(self._p2p_numbers)

    def _start(self, plan: Plan, work: Work, done: Future[None], inputs: Tensors, outputs: Tensors) -> None:
        """Run an operation whose caller has gone on; whoever waits for its Work gets the outcome."""
        if self._fault is not None:
            refusal = self._refusal(self._fault)
            self._spoil(work.operation, refusal, inputs, outputs)
            self._settle(work, done, refusal)
            return
        dispatch.started(work.operation)
        work.operation.started_ns = monotonic_ns()
        try:
            pending = plan.execute(work.operation, inputs, outputs)
        except BaseException as error:  # noqa: BLE001 - it is delivered to whoever waits
            self._spoil(work.operation, error, inputs, outputs)
            self._settle(work, done, error)
            return
        if pending is None:
            self._settle(work, done, None)
        else:
            self._follow(pending, work, done)

    def _defer(
        self,
        batch: Batch,
        start: Callable[[Plan, Work, Future[None], Tensors, Tensors], None],
        plan: Plan,
        operation: Operation,
        inputs: Tensors,
        outputs: Tensors,
    ) -> Work:
        """Collect an operation in a batch."""
        operation.is_async = True
        work, done = self._pending(operation, outputs)
        return batch.add(
            work,
            lambda: start(plan, work, done, inputs, outputs),
            lambda error: self._settle(work, done, error),
        )

    def _settle(self, work: Work, done: Future[None], error: BaseException | None) -> None:
        """Complete an asynchronous operation: record first, then wake whoever waits."""
        if error is None:
            self._finished(work.operation)
            done.set_result(None)
        else:
            done.set_exception(self._failed(work.operation, error))
        work.helper = (
            None  # it knows the Work: the two would keep each other, and the tensors, until a collection
        )
        with self._in_flight_lock:
            self._in_flight.discard(work)

    def _drain(self) -> bool:
        """Wait for what was issued, messages as well; False if that took longer than the group's limit."""
        deadline_ns = deadline_in(self.timeout_s)
        if not self._lane.drain(self.timeout_s):
            return False
        with self._in_flight_lock:
            pending = [work._pending for work in self._in_flight if work._pending is not None]
        return all(await_end(each, deadline_ns) for each in pending)

    # Batches

    def _open_batch(self) -> Batch:
        """Have the calling thread's operations collected until it calls `_close_batch`."""
        if get_ident() in self._batches:
            raise InvalidUsageError(f"group {self.info.name!r} is already inside a coalescing block")
        batch = self._batches[get_ident()] = Batch()
        return batch

    def _close_batch(self) -> Batch:
        """Return what the calling thread's operations were collected in; later ones run as ever."""
        batch = self._batches.pop(get_ident(), None)
        if batch is None:
            raise InvalidUsageError(f"group {self.info.name!r} is not inside a coalescing block")
        return batch

    @contextmanager
    def _collecting(self) -> Iterator[Batch]:
        """Collect this thread's operations; start them at the end, or none of them if the block raises."""
        batch = self._open_batch()
        try:
            yield batch
        except BaseException as error:
            self._close_batch()
            message = f"never started: the coalescing block around it raised {error!r}"
            batch.abandon(InvalidUsageError(message, group=self.info.name))
            raise
        self._close_batch()
        batch.issue()

    def _combined(self, batch: Batch, async_op: bool) -> Work:
        """Return one Work that is done when everything in a batch that was started is."""
        if not batch.works:
            return Work(Operation(Signature(OpKind.BARRIER, self.info), 0, 0, 0, False), ())
        done: Future[None] = Future()
        combined = Work(batch.works[-1].operation, [t for work in batch.works for t in work.outputs], done)
        batch.when_done(done)
        combined.helper = batch.help
        if not async_op:
            combined.wait()
        return combined

    # Outcomes

    def _finished(self, operation: Operation) -> None:
        operation.finished_ns = monotonic_ns()
        dispatch.finished(operation)
        for hook in self._hooks:
            self._call_hook(hook, operation)

    def _failed(self, operation: Operation, error: BaseException) -> BaseException:
        """Record a failure, with the operation's name filled in where the error lacks it."""
        if isinstance(error, Dist2Error):
            signature = operation.signature
            error.group = error.group or signature.group.name
            error.op = error.op or signature.kind.value
            error.seq = operation.seq if error.seq is None else error.seq
            error.rank = signature.group.rank if error.rank is None else error.rank
            _name_operation(error, operation)
        operation.error = error
        operation.finished_ns = monotonic_ns()
        self._break(operation, error)
        dispatch.finished(operation)
        for hook in self._hooks:
            self._call_hook(hook, operation)
        return error

    def _spoil(self, operation: Operation, error: BaseException, inputs: Tensors, outputs: Tensors) -> None:
        """Mark what a failed operation was to write, unless it was refused with nothing done."""
        refused = isinstance(error, Dist2Error) and error.group_usable
        if self.backend.frees_tensors and not refused:
            spoil(operation.signature, inputs, outputs)

    def _break(self, operation: Operation, error: BaseException) -> None:
        """Refuse later operations if the group cannot go on after this error."""
        if self._fault is not None:
            return
        if isinstance(error, Dist2Error):
            if not error.group_usable:
                self._fault = error
        else:  # KeyboardInterrupt, SystemExit, no memory: the others are mid-way
            self._fault = GroupAbortedError(
                f"{operation.describe()} was interrupted by {type(error).__name__} in this process",
                group=self.info.name,
                rank=self.info.rank,
            )

    def _release(self) -> None:
        """After an abort, called by whoever leaves the group: the last one takes down what they used."""
        if self._lane.retire():
            self.backend.shutdown()

    def _refusal(self, fault: Dist2Error) -> Dist2Error:
        """Return what an operation on a broken group raises: the kind of error that broke it.

        Where ranks died, it names those as well that died since.
        """
        if isinstance(fault, PeerLostError):
            fault.ranks = tuple(sorted({*fault.ranks, *self.backend.lost()}))
            names = ", ".join(map(str, fault.ranks))
            return fault.again(
                f"group {self.info.name!r} cannot be used any more, rank(s) {names} are lost: {fault}"
            )
        return fault.again(f"group {self.info.name!r} cannot be used any more: {fault}")

    def _call_hook(self, hook: Callable[[Operation], None], operation: Operation) -> None:
        try:
            hook(operation)
        except Exception as error:  # noqa: BLE001 - a hook must never break a collective
            log.error("completion_hook_failed", group=self.info.name, hook=repr(hook), error=repr(error))

    def register_completion_hook(self, hook: Callable[[Operation], None]) -> Callable[[], None]:
        """Call ``hook(operation)`` after every operation of the group; return what removes it.

        It runs on the thread that completed the operation. One that raises is logged and kept.
        """
        if not callable(hook):
            raise InvalidUsageError(f"hook must be callable, got {hook!r} ({type(hook).__name__})")
        self._hooks = (*self._hooks, hook)

        def remove() -> None:
            self._hooks = tuple(each for each in self._hooks if each is not hook)

        return remove


def _name_operation(error: Dist2Error, operation: Operation) -> None:
    """Say in the message which operation failed, where what raised it could not know."""
    if isinstance(error, (OperationTimeoutError, PeerLostError)) and operation.describe() not in str(error):
        where = f"{operation.describe()} in group {operation.signature.group.name!r}"
        error.args = (f"{where}: {error}",)
        if isinstance(error, OperationTimeoutError) and error.timeout_s is None:
            error.timeout_s = operation.timeout_s
            error.elapsed_s = (monotonic_ns() - operation.created_ns) / 1e9
            limit = f"after {error.elapsed_s:.3g} s, limit {operation.timeout_s:.3g} s"
            error.args = (f"{error} ({limit})",)
