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

An operation that is not complete when its call returns is held in a set until it is: torch's C++ may hold
only the C++ half of its Work, and the Python half would be collected.

`run` and `run_p2p` of a runner are methods of its part in C (``compiled/source/records``), which handles the
usual call and leaves every other one to the methods below.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import NoReturn

import torch

from dist2.compiled import records
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.operation.aliasing import on_copies
from dist2.operation.coalescing import Batch
from dist2.operation.execution import Executor, Helped, Outcome, StreamOrdered, Tensors
from dist2.operation.host_staging import is_staged, through_host
from dist2.operation.instruments import dispatch
from dist2.operation.kinds import OpKind
from dist2.operation.plan_cache import Plan, Plans
from dist2.operation.poisoning import poison_outputs
from dist2.operation.queue import CollectiveQueue, refuse_to_wait
from dist2.operation.signature import GroupInfo, Operation, Signature
from dist2.operation.storage import always_on, wait_async_tensors
from dist2.operation.stream_work import StreamWork
from dist2.operation.work import Work
from dist2.runtime.code_marks import folders_of, library
from dist2.runtime.completion import Completion
from dist2.runtime.deadline import FOREVER_NS, PAST_NS, deadline_in, seconds
from dist2.runtime.signals import OnCtrlC, await_end, on_ctrl_c

Timeout = timedelta | float | None

LIBRARY_PATHS = (*folders_of(library()), *folders_of(torch.__spec__))
"""Frames of files in these folders are skipped when the user's line is looked for."""

log = logging.getLogger("dist2.group.process_group")
_PATIENCE_S = 5.0
"""Time before `drain` names the calls that it waits for, in seconds."""


def _ignore(operation: Operation, error: BaseException) -> None:
    """Take no notice: the group is closed."""


@on_ctrl_c(OnCtrlC.DEFER)
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
        self.state = records.GroupState(int(timeout_s * 1e9))
        self.queue = CollectiveQueue(info.name, info)
        self.plans = Plans()
        self.closed = False
        self.on_failure: Callable[[Operation, BaseException], None] = _ignore
        self._work_type = StreamWork if backend.stream_ordered else Work
        self._in_flight: set[Work] = set()
        self._in_flight_lock = threading.Lock()
        self.in_c: records.OperationRunner | None = self._part_in_c()

    def _part_in_c(self) -> records.OperationRunner:
        """Have the part in C take the calls: an attribute of the object spares a frame in Python."""
        in_c = records.OperationRunner(
            group=self,
            otherwise=self.run,
            otherwise_beside=self.run_p2p,
            state=self.state,
            queue=self.queue,
            dispatch=dispatch,
            operation_type=Operation,
            seconds=seconds,
            here=LIBRARY_PATHS,
            plans=self.plans,
            rank=self.info.rank,
            natively_async=self.backend.natively_async,
        )
        self.run = in_c.run  # type: ignore[method-assign, assignment]  # replaces the method
        self.run_p2p = in_c.run_beside  # type: ignore[method-assign, assignment]  # replaces the method
        return in_c

    def let_go(self) -> None:
        """Drop references back to the group, once it is closed, so that reference counting frees it."""
        self.plans.clear()
        self.on_failure = _ignore
        self.in_c = None
        for name in ("run", "run_p2p"):  # the methods below refuse calls as well
            self.__dict__.pop(name, None)

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
        operation = self._begin(plan.signature, async_op, timeout)
        if self.state.batches and (batch := self.state.batches.get(get_ident())) is not None:
            return self._defer(batch, self._issue, plan, operation, inputs, outputs)
        queue = self.queue
        if (async_op and not self.backend.natively_async) or not (seq := queue.enter()):
            if not async_op:
                if not queue.let_go():
                    refuse_to_wait(operation)
            elif (in_c := self.in_c) is not None and not self.backend.natively_async:
                in_c.issuing = self._in_flight, self._job_done, Completion  # the next ones go in C
            work, done = self._pending(operation, outputs)
            self._issue(plan, work, done, inputs, outputs)
            return self._returned(work, done)
        operation.seq = seq
        try:
            pending = self._execute(plan, operation, inputs, outputs)
        finally:
            queue.leave()
            self._job_done()
        return self._work(operation, outputs, pending)

    def run_p2p(
        self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout
    ) -> Work:
        """Run or issue a point-to-point operation: beside the queue, never behind a collective."""
        operation = self._begin(plan.signature, async_op, timeout)
        if self.state.batches and (batch := self.state.batches.get(get_ident())) is not None:
            return self._defer(batch, self._start_p2p, plan, operation, inputs, outputs)
        operation.seq = self.queue.number_message()
        queue = self.queue
        queue.enter_beside()
        try:
            pending = self._execute(plan, operation, inputs, outputs)
        finally:
            queue.leave_beside()
            self._job_done()
        return self._work(operation, outputs, pending)

    def _begin(self, signature: Signature, async_op: bool, timeout: Timeout) -> Operation:
        """Return the record of a new call, unless the group refuses calls."""
        if self.state.fault is not None:
            raise self.refusal(self.state.fault)
        limit_ns = self.state.limit_ns if timeout is None else int(seconds(timeout) * 1e9)
        return Operation.begun(signature, limit_ns, async_op, LIBRARY_PATHS)

    def _execute(self, plan: Plan, operation: Operation, inputs: Tensors, outputs: Tensors) -> Outcome:
        """Hand an operation to the backend in the thread that called it."""
        dispatch.started(operation)
        operation.started_ns = operation.created_ns
        try:
            pending = plan.execute(operation, inputs, outputs)
        except BaseException as error:  # noqa: BLE001 - recorded and raised again
            self._fail_inline(operation, error, inputs, outputs)
        if pending is None:
            self._finished(operation)
        return pending

    def _work(self, operation: Operation, outputs: Tensors, pending: Outcome) -> Work:
        """Return the Work of an operation that the backend completed, or completes later."""
        if pending is None:
            return Work(operation, outputs)
        work, done = self._pending(operation, outputs)
        self._follow(pending, work, done)
        return self._returned(work, done)

    # Operations that another thread may run

    def _issue(self, plan: Plan, work: Work, done: Completion, inputs: Tensors, outputs: Tensors) -> None:
        """Queue a collective; a thread that waits for it may run it."""
        dispatch.notice(work.operation)
        queue, ends_ns = self.queue, FOREVER_NS
        if self.backend.stream_ordered and (seq := queue.enter()):
            self._start_at_once(seq, plan, work, done, inputs, outputs)
            return

        def help_out(until_ns: int) -> None:
            if until_ns >= ends_ns:  # running it may take that long, and nothing ends it before
                queue.help(done.done)
            elif until_ns == PAST_NS:
                queue.hurry()

        work.helper = help_out
        start = self.backend.bound(partial(self._start, plan, work, done, inputs, outputs))
        try:
            ends_ns = queue.put(work.operation, start, self._job_done)
        except BaseException:
            work.helper = None
            with self._in_flight_lock:
                self._in_flight.discard(work)  # no thread will complete it
            raise

    def _start_at_once(
        self, seq: int, plan: Plan, work: Work, done: Completion, inputs: Tensors, outputs: Tensors
    ) -> None:
        """Start a collective on the caller's stream, with the turn taken: it blocks no thread."""
        work.operation.seq = seq
        try:
            error = self._start(plan, work, done, inputs, outputs)
        finally:
            self.queue.leave()
            self._job_done()
        if error is not None:
            raise error

    def _start_p2p(self, plan: Plan, work: Work, done: Completion, inputs: Tensors, outputs: Tensors) -> None:
        """Start a point-to-point operation that was collected in a batch."""
        work.operation.seq = self.queue.number_message()
        self._start(plan, work, done, inputs, outputs)

    def _start(
        self, plan: Plan, work: Work, done: Completion, inputs: Tensors, outputs: Tensors
    ) -> BaseException | None:
        """Run an operation in the background; threads that wait for its Work get the outcome.

        Returns:
            An exception that concerns the calling thread as well: Ctrl-C, say.
        """
        if self.state.fault is not None:
            refusal = self.refusal(self.state.fault)
            self._poison(work.operation, refusal, inputs, outputs)
            self._settle(work, done, refusal)
            return None
        dispatch.started(work.operation)
        work.operation.started_ns = monotonic_ns()
        try:
            pending = plan.execute(work.operation, inputs, outputs)
        except BaseException as error:  # noqa: BLE001 - it is delivered to those that wait
            return self._fail_async(error, work, done, inputs, outputs)
        if pending is None:
            self._settle(work, done, None)
        else:
            self._follow(pending, work, done)
        return None

    def _pending(self, operation: Operation, outputs: Tensors) -> tuple[Work, Completion]:
        """Return a Work and its completion; hold the Work until it is complete."""
        done = Completion()
        work = self._work_type(operation, outputs, done)
        with self._in_flight_lock:
            self._in_flight.add(work)
        return work, done

    def _follow(self, pending: Future[None] | Helped, work: Work, done: Completion) -> None:
        """Settle an operation when the backend has completed it."""
        if isinstance(pending, Helped):
            work.helper = pending.help
        if isinstance(pending, StreamOrdered) and isinstance(work, StreamWork):
            work.ordered = pending

        def ended(pending: Future[None] | Helped) -> None:
            error = pending.exception()
            if error is not None:
                self._poison(work.operation, error, (), work.outputs)
            self._settle(work, done, error)

        pending.add_done_callback(ended)

    def _settle(self, work: Work, done: Completion, error: BaseException | None) -> None:
        """Complete an asynchronous operation: first its record, then those that wait for it."""
        if error is None:
            self._finished(work.operation)
            done.set_result(None)
        else:
            done.set_exception(self._fail(work.operation, error))
        work.helper = None  # it refers to the Work: a cycle would keep the tensors until a collection
        with self._in_flight_lock:
            self._in_flight.discard(work)

    @staticmethod
    def _returned(work: Work, done: Completion) -> Work:
        """Return a Work as its caller asked for it: pending, or complete."""
        if not work.operation.is_async:
            helper = work.helper
            if helper is not None:
                helper(FOREVER_NS)
            await_end(done, FOREVER_NS)
            done.result()
        return work

    def queued(self) -> list[Operation]:
        """Return the operations that were issued and wait for their turn, oldest first."""
        with self._in_flight_lock:
            issued = [work.operation for work in list(self._in_flight)]  # a copy: C takes no lock
        waiting = [each for each in issued if not each.started_ns and not each.finished_ns]
        return sorted(waiting, key=lambda operation: operation.created_ns)

    def drain(self) -> bool:
        """Wait until everything issued is complete; False if that took longer than the group's timeout."""
        deadline_ns = deadline_in(self.timeout_s)
        if not self.queue.drain(self.timeout_s):
            return False
        with self._in_flight_lock:
            pending = {work: work._pending for work in list(self._in_flight) if work._pending is not None}
        soon_ns = min(deadline_ns, deadline_in(_PATIENCE_S))
        late = [work for work, end in pending.items() if not await_end(end, soon_ns)]
        if late:  # no peer may ever send what a forgotten Work receives
            calls = "; ".join(work.operation.describe() for work in late)
            log.warning("group %r still runs calls that nobody has waited for: %s", self.info.name, calls)
        return all(await_end(pending[work], deadline_ns) for work in late)

    # How operations end

    def _finished(self, operation: Operation) -> None:
        """Record and report an operation that succeeded."""
        operation.finished_ns = monotonic_ns()
        dispatch.finished(operation)
        if self.state.hooks:
            self._tell_hooks(operation)

    def _fail_inline(
        self, operation: Operation, error: BaseException, inputs: Tensors, outputs: Tensors
    ) -> NoReturn:
        """Record and report an operation that failed in its caller's thread; raise its error."""
        self._poison(operation, error, inputs, outputs)
        raise self._fail(operation, error) from error.__cause__

    def _fail_async(
        self, error: BaseException, work: Work, done: Completion, inputs: Tensors, outputs: Tensors
    ) -> BaseException | None:
        """Give the error to those that wait; return it if it concerns the calling thread as well."""
        self._poison(work.operation, error, inputs, outputs)
        self._settle(work, done, error)
        return None if isinstance(error, Exception) else error

    def _fail(self, operation: Operation, error: BaseException) -> BaseException:
        """Record and report a failure; return the error, with the operation's name and place filled in."""
        if isinstance(error, (GroupRevokedError, PeerLostError)) and error.seq is None:
            error = _own(error)
        if isinstance(error, Dist2Error):
            if error.seq != operation.seq:  # else it was raised for this operation, and names it
                _name_operation(error, operation)
            _locate(error, operation)
        operation.error = error
        operation.finished_ns = monotonic_ns()
        self._break(operation, error)
        dispatch.finished(operation)
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
        done = Completion()
        combined = Work(batch.works[-1].operation, [t for work in batch.works for t in work.outputs], done)
        batch.when_done(done)
        combined.helper = batch.help
        if not async_op:
            combined.wait()
        return combined

    def _defer(
        self,
        batch: Batch,
        start: Callable[[Plan, Work, Completion, Tensors, Tensors], None],
        plan: Plan,
        operation: Operation,
        inputs: Tensors,
        outputs: Tensors,
    ) -> Work:
        """Collect an operation in a batch."""
        operation.is_async = True
        work, done = self._pending(operation, outputs)
        thread = get_ident()

        def refuse_to_wait_inside(until_ns: int) -> None:
            if until_ns != PAST_NS and get_ident() == thread:
                raise InvalidUsageError(
                    f"{operation.describe()} is inside a coalescing block, which starts it when it ends: "
                    f"wait for it after the block",
                    group=self.info.name,
                )

        def begin() -> None:
            work.helper = None
            start(plan, work, done, inputs, outputs)

        work.helper = refuse_to_wait_inside
        return batch.add(work, begin, lambda error: self._settle(work, done, error))


def _own(error: Dist2Error) -> Dist2Error:
    """Return a copy for one operation: all that run when a group breaks raise the same error."""
    own = error.again(str(error))
    own.__cause__ = error.__cause__
    return own


def _locate(error: Dist2Error, operation: Operation) -> None:
    """Fill in the place of a failed operation, where the code that raised could not know it."""
    signature = operation.signature
    group = signature.group
    error.locate(group.name, signature.kind.value, operation.seq, group.rank, group.global_ranks)


@on_ctrl_c(OnCtrlC.DEFER)
def _name_operation(error: Dist2Error, operation: Operation) -> None:
    """Name the failed operation in the message, where the code that raised could not know it."""
    if isinstance(error, (OperationTimeoutError, PeerLostError, GroupRevokedError)):
        error.prefix(f"{operation.describe()} in group {operation.signature.group.name!r}")
        if isinstance(error, OperationTimeoutError) and error.timeout_s is None:
            error.timeout_s = operation.timeout_s
            error.elapsed_s = (monotonic_ns() - operation.created_ns) / 1e9
            # torch's words: programs that ran on torch search for them
            error.args = (
                f"{error}. Timed out after {error.elapsed_s:.3g} s, limit {operation.timeout_s:.3g} s",
            )
