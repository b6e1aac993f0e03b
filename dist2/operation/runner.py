# cython: annotation_typing=False
"""`OperationRunner`: the one path that every operation of a group takes, from its call to its end.

Theory of operation. A collective runs through these steps, in this file from top to bottom:

1. `run` makes the record of the call (`_begin`), unless the group refuses calls.
2. If the group is idle, `CollectiveQueue.enter` numbers the operation and it runs in the calling thread:
   `_execute` tells the instruments, hands the tensors to the backend's plan, and tells the instruments
   again. Otherwise, or with ``async_op=True``, `_issue` queues it; a thread that waits for it, or the queue's
   own thread, later runs it by `_start`.
3. An operation that succeeds ends in `_finished`; one that fails in `_fail_inline` (its caller raises) or
   `_fail` (those that wait for its Work raise). An error that the group cannot survive is kept in
   `GroupState.fault`: every later call raises it again (`refusal`).

Point-to-point operations (`run_p2p`) do the same beside the queue: they never wait behind a collective.

An operation that is not complete when its call returns is in a set until it is, for `drain` and `queued`.

This module is compiled by Cython. Calls with positional arguments of plain tensors come from
`dist2.c10d.fast_methods` with the addresses of the tensors, which plans in C read while the call is under
way.
A function here has no Python frame; what it calls has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import get_ident
from typing import Any, NoReturn

import cython
import torch
from cython.cimports.dist2.operation.interpreter import monotonic_ns
from cython.cimports.dist2.operation.record import begin
from cython.cimports.dist2.operation.work import completed

from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.operation.aliasing import on_copies
from dist2.operation.async_call import AsyncCall
from dist2.operation.coalescing import Batch, BatchWork
from dist2.operation.execution import Executor, Outcome, Tensors
from dist2.operation.failures import locate, name_operation, own, poison_outputs
from dist2.operation.host_staging import is_staged, through_host
from dist2.operation.instruments import Dispatch, dispatch
from dist2.operation.kinds import OpKind
from dist2.operation.plan_cache import Plan, Plans
from dist2.operation.queue import CollectiveQueue, refuse_to_wait
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature
from dist2.operation.storage import always_on, wait_async_tensors
from dist2.operation.stream_work import StreamWork
from dist2.operation.work import Work
from dist2.runtime.built import check_built
from dist2.runtime.code_marks import folders_of, library
from dist2.runtime.deadline import PAST_NS, deadline_in, seconds
from dist2.runtime.signals import await_end

check_built(__name__, __file__)

Timeout = timedelta | float | None

LIBRARY_PATHS = (*folders_of(library()), *folders_of(torch.__spec__))
"""Frames of files in these folders are skipped when the user's line is looked for."""

log = logging.getLogger("dist2.group.process_group")
_PATIENCE_S = 5.0
"""Time before `drain` names the calls that it waits for, in seconds."""


def _ignore(operation: Operation, error: BaseException) -> None:
    """Take no notice: the group is closed."""


DISPATCH: Dispatch = dispatch


class GroupState:
    """State on which a group's calls depend, besides their arguments.

    Args:
        limit_ns: Limit of operations that name none, in nanoseconds.

    Attributes:
        fault: The error with which the group refuses operations; None while it accepts them.
        aborted: The last thread to leave the group must release its resources.
        hooks: Called after every operation.
        batches: The batch that collects a thread's operations, by thread id.
    """

    limit_ns: int
    fault: Dist2Error | None
    aborted: bool
    hooks: tuple[Callable[[Any], None], ...]
    batches: dict[int, Batch]

    def __init__(self, limit_ns: int) -> None:
        self.limit_ns = limit_ns
        self.fault = None
        self.hooks = ()
        self.batches = {}


class OperationRunner:
    """Runs, numbers and ends the operations of one group, and keeps what they share.

    Attributes:
        info: Identity of the group.
        backend: Moves its tensors.
        state: Fault, default timeout, hooks and open batches of the group.
        queue: Order and numbers of its collectives.
        plans: Plans of earlier calls.
        closed: Whether the group was shut down or aborted in this process.
        on_failure: Called with each operation that failed and its error, after the group's state was changed.
    """

    def __init__(self, info: GroupInfo, backend: Executor, timeout_s: float) -> None:
        self.info = info
        self.backend = backend
        self.state = GroupState(int(timeout_s * 1e9))
        self.queue = CollectiveQueue(info.name, info)
        self.plans = Plans()
        self.closed = False
        self.on_failure: Callable[[Operation, BaseException], None] = _ignore
        self.here: tuple[str, ...] | None = LIBRARY_PATHS
        self._natively_async = backend.natively_async
        self._stream_ordered = backend.stream_ordered
        self._work_type: Callable[..., Work] = StreamWork if backend.stream_ordered else Work
        self._in_flight: set[Work] = set()

    def let_go(self) -> None:
        """Drop references back to the group, once it is closed, so that reference counting frees it."""
        self.plans.clear()
        self.on_failure = _ignore

    # State of the group

    @property
    def fault(self) -> Dist2Error | None:
        """The error that makes the group refuse operations; None while it takes them."""
        return self.state.fault

    @fault.setter
    def fault(self, fault: Dist2Error | None) -> None:
        self.state.fault = fault

    @property
    def timeout_s(self) -> float:
        """Timeout of operations that name none, in seconds."""
        return self.state.limit_ns / 1e9

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.state.limit_ns = int(timeout_s * 1e9)

    def check_open(self) -> None:
        """Raise if the group was closed in this process."""
        if self.closed:
            closed = GroupAbortedError(f"group {self.info.name!r} is closed", group=self.info.name)
            raise closed if self.fault is None else self.refusal(self.fault)

    def refusal(self, fault: Dist2Error) -> Dist2Error:
        """Return the error of a call on a broken group: of the type that broke it, naming all dead ranks."""
        if not self.closed and not isinstance(fault, GroupRevokedError):
            self.backend.look()  # no other thread reads the links of a broken group
        fault = self.fault or fault
        if isinstance(fault, PeerLostError):
            fault.ranks = tuple(sorted({*fault.ranks, *self.backend.lost()}))
            lost = self.backend.names(fault.ranks)
            return fault.again(f"group {self.info.name!r} cannot be used any more, lost {lost}: {fault}")
        if isinstance(fault, GroupAbortedError) and self.closed:  # its text names the group
            return fault.again(f"{fault}: create another one with new_group")
        return fault.again(f"group {self.info.name!r} cannot be used any more: {fault}")

    def take_revocation(self, error: GroupRevokedError) -> None:
        """Refuse operations because a member revoked the group. From any thread; sets fields only."""
        fault = self.fault
        if self.closed or isinstance(fault, GroupRevokedError):
            return
        error.group, error.rank = self.info.name, self.info.rank
        if fault is not None:
            error.__cause__ = fault
        self.fault = error

    # From the call to the backend

    def add_plan(self, signature: Signature, agreed: Hashable, inputs: Tensors, outputs: Tensors) -> Plan:
        """Have the backend plan the first call of a signature; keep the plan for later calls like it."""
        prepare = self.backend.plan_plain if self.plans.plain(inputs, outputs) else self.backend.plan
        read = wait_async_tensors(inputs)
        written = read if outputs is inputs else wait_async_tensors(outputs)
        execute, staged = prepare(signature), self.backend.staged_types
        if is_staged((*read, *written), staged):
            execute = through_host(execute, staged)
        execute = on_copies(execute, signature, read, written)
        if read is not inputs or written is not outputs:
            execute = always_on(execute, read, written)  # bound to these tensors, so never cached
        plan = Plan(signature, execute)
        self.plans.keep(signature.kind, agreed, inputs, outputs, plan)
        return plan

    def run(self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout) -> Work:
        """Run or issue a collective."""
        return self.run_at(plan, inputs, outputs, async_op, timeout, cython.NULL)

    def run_p2p(
        self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout
    ) -> Work:
        """Run or issue a point-to-point operation: beside the queue, never behind a collective."""
        return self.run_beside_at(plan, inputs, outputs, async_op, timeout, cython.NULL)

    def run_at(
        self,
        plan: Plan,
        inputs: Tensors,
        outputs: Tensors,
        async_op: bool,
        timeout: Timeout,
        places: Any,
    ) -> Work:
        """Run or issue a collective, with the addresses of its tensors if they are known."""
        operation = self._begin(plan.signature, async_op, timeout)
        if self.state.batches and get_ident() in self.state.batches:
            return self._defer(plan, operation, inputs, outputs, False)
        queue = self.queue
        if not async_op or self._natively_async:
            operation.seq = queue.enter()
            if operation.seq:
                try:
                    pending = self._execute(plan, operation, inputs, outputs, places)
                finally:
                    self._left(queue.left())
                return self._work(plan, operation, outputs, pending)
            if not async_op and not queue.let_go():
                refuse_to_wait(operation)
        call = self._pending(plan, operation, inputs, outputs)
        work = call._work  # once issued, another thread may complete it
        self._issue(call)
        return call.returned(work)

    def run_beside_at(
        self,
        plan: Plan,
        inputs: Tensors,
        outputs: Tensors,
        async_op: bool,
        timeout: Timeout,
        places: Any,
    ) -> Work:
        """Run or issue a point-to-point operation, with the address of its tensor if that is known."""
        operation = self._begin(plan.signature, async_op, timeout)
        if self.state.batches and get_ident() in self.state.batches:
            return self._defer(plan, operation, inputs, outputs, True)
        queue = self.queue
        operation.seq = queue.number_message()
        queue.enter_beside()
        try:
            pending = self._execute(plan, operation, inputs, outputs, places)
        finally:
            queue.leave_beside()
            self._left(False)
        return self._work(plan, operation, outputs, pending)

    def send_first(self, plan: Plan, tensor: torch.Tensor, address: int, async_op: bool) -> Work | None:
        """Send a message before it is recorded: its receiver waits for each step of the sender before that.

        The effect is that of `run_beside_at`. None, with nothing done, if the plan or the group needs that.
        """
        if plan.lane is None or not self._takes_calls():
            return None
        now = cython.declare(cython.longlong, monotonic_ns())
        sent = plan.lane.send(cython.cast("const char *", address), now)
        if not sent:
            return None
        operation = begin(plan.signature, now, self.state.limit_ns, async_op, self.here)
        queue = self.queue
        operation.seq = queue.number_message()
        queue.enter_beside()
        try:
            DISPATCH.started(operation)
            operation.started_ns = operation.created_ns
            try:
                plan.lane.sent(operation, sent)
            except BaseException as error:  # noqa: BLE001 - recorded and raised again
                self._fail_inline(operation, error, (tensor,), ())
            self._finished(operation)
        finally:
            queue.leave_beside()
            self._left(False)
        return completed(operation, ())

    def _takes_calls(self) -> bool:
        """Whether the group neither refuses nor defers calls."""
        return self.state.fault is None and not self.state.batches

    def _limit_ns(self, timeout: Timeout) -> int:
        """Return the limit of a call."""
        return self.state.limit_ns if timeout is None else int(seconds(timeout) * 1e9)

    def _begin(self, signature: Signature, async_op: bool, timeout: Timeout) -> Operation:
        """Return the record of a new call, unless the group refuses calls."""
        if self.state.fault is not None:
            raise self.refusal(self.state.fault)
        return begin(signature, monotonic_ns(), self._limit_ns(timeout), async_op, self.here)

    def _execute(
        self, plan: Plan, operation: Operation, inputs: Tensors, outputs: Tensors, places: Any
    ) -> Outcome:
        """Hand an operation to the backend in the thread that called it."""
        DISPATCH.started(operation)
        operation.started_ns = operation.created_ns
        operation._places = places
        try:
            pending = plan.execute(operation, inputs, outputs)
        except BaseException as error:  # noqa: BLE001 - recorded and raised again
            self._fail_inline(operation, error, inputs, outputs)
        finally:
            operation._places = cython.NULL
        if pending is None:
            self._finished(operation)
        return pending

    def _left(self, waited: bool) -> int:
        """Wake threads that wait for the queue; after an abort, clean up if this thread was the last."""
        try:
            if waited:
                self.queue.hand_on()
        finally:
            if self.state.aborted:
                self.release()
        return 0

    def _work(self, plan: Plan, operation: Operation, outputs: Tensors, pending: Outcome) -> Work:
        """Return the Work of an operation that the backend completed, or completes later."""
        if pending is None:
            return completed(operation, outputs)
        call = self._pending(plan, operation, (), outputs)
        work = call._work
        call.follow(pending)
        return call.returned(work)

    # Operations that another thread may run

    def _pending(self, plan: Plan, operation: Operation, inputs: Tensors, outputs: Tensors) -> AsyncCall:
        """Return a call whose Work is held until it is complete.

        It has tuples of its own: the caller may change its lists before another thread runs the call.
        """
        in_place = outputs is inputs
        inputs = tuple(inputs)
        outputs = inputs if in_place else tuple(outputs)
        call: AsyncCall = AsyncCall(self, plan, operation, inputs, outputs)
        call._work = self._work_type(operation, outputs, call)
        self._in_flight.add(call._work)
        return call

    def _issue(self, call: AsyncCall) -> None:
        """Queue a collective; a thread that waits for it may run it."""
        DISPATCH.notice(call._operation)
        queue = self.queue
        if self._stream_ordered and (seq := queue.enter()):
            self._start_at_once(seq, call)
            return
        call._work.helper = call.help_out
        start = self.backend.bound(call.start)
        try:
            call._ends_ns = queue.put(call._operation, start, self._job_done)
        except BaseException:
            call.forget()  # no thread will complete it
            raise

    def _start_at_once(self, seq: int, call: AsyncCall) -> None:
        """Start a collective on the caller's stream, with the turn taken: it blocks no thread."""
        call._operation.seq = seq
        try:
            error = call.start()
        finally:
            self.queue.leave()
            self._job_done()
        if error is not None:
            raise error

    def queued(self) -> list[Operation]:
        """Return the operations that were issued and wait for their turn, oldest first."""
        issued = [work.operation for work in list(self._in_flight)]
        waiting = [each for each in issued if not each.started_ns and not each.finished_ns]
        return sorted(waiting, key=lambda operation: operation.created_ns)

    def is_idle(self) -> bool:
        """Whether the group works, and nothing is under way."""
        done = all(work.is_completed() for work in list(self._in_flight))
        return done and self.fault is None and self.queue.empty

    def drain(self) -> bool:
        """Wait until everything issued is complete; False if that took longer than the group's timeout."""
        deadline_ns = deadline_in(self.timeout_s)
        if not self.queue.drain(self.timeout_s):
            return False
        pending = {work: work._pending for work in list(self._in_flight) if work._pending is not None}
        soon_ns = min(deadline_ns, deadline_in(_PATIENCE_S))
        late = [work for work, end in pending.items() if not await_end(end, soon_ns)]
        if late:  # no peer may ever send what a forgotten Work receives
            calls = "; ".join(work.operation.describe() for work in late)
            log.warning("group %r still runs calls that nobody has waited for: %s", self.info.name, calls)
        return all(await_end(pending[work], deadline_ns) for work in late)

    # How operations end

    def _finished(self, operation: Operation) -> int:
        """Record and report an operation that succeeded."""
        operation.finished_ns = monotonic_ns()
        DISPATCH.finished(operation)
        if self.state.hooks:
            self._tell_hooks(operation)
        return 0

    def _fail_inline(
        self, operation: Operation, error: BaseException, inputs: Tensors, outputs: Tensors
    ) -> NoReturn:
        """Record and report an operation that failed in its caller's thread; raise its error."""
        try:
            self._poison(operation, error, inputs, outputs)
        finally:  # whatever is raised there: the record ends, and the group refuses later calls
            failure = self._fail(operation, error)
        raise failure from error.__cause__

    def _fail(self, operation: Operation, error: BaseException) -> BaseException:
        """Record and report a failure; return the error, with the operation's name and place filled in."""
        shared = (GroupRevokedError, OperationTimeoutError, PeerLostError)  # one object fails several calls
        if isinstance(error, shared) and error.seq is None:
            error = own(error)
        if isinstance(error, Dist2Error):
            if error.seq != operation.seq:  # else it was raised for this operation, and names it
                name_operation(error, operation)
            locate(error, operation)
        operation.error = error
        operation.finished_ns = monotonic_ns()
        try:
            self._break(operation, error)
        finally:
            DISPATCH.finished(operation)
        self._tell_hooks(operation)
        return error

    def _poison(self, operation: Operation, error: BaseException, inputs: Tensors, outputs: Tensors) -> None:
        """Poison the outputs of a failed operation, unless it was refused with nothing done."""
        refused = isinstance(error, Dist2Error) and error.group_usable
        if self.backend.frees_tensors and not refused:
            poison_outputs(operation.signature, inputs, outputs)

    def _break(self, operation: Operation, error: BaseException) -> None:
        """Refuse later operations if the group cannot go on after this error."""
        usable = isinstance(error, Dist2Error) and error.group_usable
        if self.state.fault is None and not usable:
            self.backend.broken_by(error)
            self.state.fault = (
                error if isinstance(error, Dist2Error) else self._interruption(operation, error)
            )
        self.on_failure(operation, error)

    def _interruption(self, operation: Operation, error: BaseException) -> GroupAbortedError:
        """Return the fault after KeyboardInterrupt, MemoryError and the like: other ranks still wait."""
        return GroupAbortedError(
            f"{operation.describe()} was interrupted by {type(error).__name__} in this process",
            group=self.info.name,
            rank=self.info.rank,
        )

    def _job_done(self) -> None:
        """Release the resources of an aborted group, if the calling thread was the last one inside."""
        if self.state.aborted:
            self.release()

    def release(self) -> None:
        """After an abort: close the backend as soon as no thread is inside an operation."""
        if self.queue.retire():
            self.backend.shutdown()

    # Completion hooks

    def register_completion_hook(self, hook: Callable[[Operation], None]) -> Callable[[], None]:
        """Call ``hook(operation)`` after every operation; return a callable that removes it."""
        if not callable(hook):
            raise InvalidUsageError(f"hook must be callable, got {hook!r} ({type(hook).__name__})")
        self.state.hooks = (*self.state.hooks, hook)

        def remove() -> None:
            self.state.hooks = tuple(each for each in self.state.hooks if each is not hook)

        return remove

    def _tell_hooks(self, operation: Operation) -> None:
        for hook in self.state.hooks:
            try:
                hook(operation)
            except Exception as error:  # noqa: BLE001 - a hook must never break a collective
                log.error("group %s: completion hook %r raised %r", self.info.name, hook, error)

    # Batches: operations collected in a coalescing block

    def open_batch(self) -> Batch:
        """Collect the calling thread's operations until it calls `close_batch`."""
        if get_ident() in self.state.batches:
            raise InvalidUsageError(f"group {self.info.name!r} is already inside a coalescing block")
        batch = self.state.batches[get_ident()] = Batch()
        return batch

    def close_batch(self) -> Batch:
        """Return the batch of the calling thread; its later operations run at once again."""
        batch = self.state.batches.pop(get_ident(), None)
        if batch is None:
            raise InvalidUsageError(f"group {self.info.name!r} is not inside a coalescing block")
        return batch

    @contextmanager
    def collecting(self) -> Iterator[Batch]:
        """Collect the calling thread's operations; start them at the end, or none if the block raises."""
        batch = self.open_batch()
        try:
            yield batch
        except BaseException as error:
            self.close_batch()
            message = f"never started: the coalescing block around it raised {error!r}"
            batch.abandon(InvalidUsageError(message, group=self.info.name))
            raise
        self.close_batch()
        self.issue(batch)

    def issue(self, batch: Batch) -> None:
        """Start every operation of a batch."""
        with self.backend.together():
            batch.issue()

    def combined(self, batch: Batch, async_op: bool) -> Work:
        """Return one Work that is complete when every operation of an issued batch is."""
        if not batch.works:
            return Work(Operation(Signature(OpKind.BARRIER, self.info), 0, 0, 0, False), ())
        combined = BatchWork(batch)
        if not async_op:
            combined.wait()
        return combined

    def _defer(
        self, plan: Plan, operation: Operation, inputs: Tensors, outputs: Tensors, beside: bool
    ) -> Work:
        """Collect an operation in the calling thread's batch."""
        operation.is_async = True
        call, thread = self._pending(plan, operation, inputs, outputs), get_ident()

        def refuse_to_wait_inside(until_ns: int) -> None:
            if until_ns != PAST_NS and get_ident() == thread:
                raise InvalidUsageError(
                    f"{operation.describe()} is inside a coalescing block, which starts it when it ends: "
                    f"wait for it after the block",
                    group=self.info.name,
                )

        def start() -> None:
            call._work.helper = None
            if beside:
                operation.seq = self.queue.number_message()
                call.start()
            else:
                self._issue(call)

        call._work.helper = refuse_to_wait_inside
        return self.state.batches[thread].add(call._work, start, call.settle)
