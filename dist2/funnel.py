"""The one way every operation goes: look up the plan, number, tell instruments, run, tell again.

`Funnel` is the lowest layer of `dist2.group.ProcessGroup`; the operations themselves are in
``collectives.py`` and ``point_to_point.py``. This is the hot path: what depends on the call's
signature alone is computed on its first call and kept in its `Plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING

import torch

from dist2.backends.base import Backend, GroupSpec, Helped, ignore_revocation
from dist2.clock import FOREVER_NS, PAST_NS, seconds
from dist2.coalescing import Batch
from dist2.compiled import records
from dist2.completion import Completion
from dist2.errors import InvalidUsageError
from dist2.hooks import dispatch
from dist2.operation import Operation, Signature
from dist2.ops import OpKind
from dist2.outstanding import Outstanding
from dist2.overlaps import on_copies
from dist2.plans import Plan, Plans
from dist2.stand_ins import always_on, awaited
from dist2.work import Work, refuse_to_wait

if TYPE_CHECKING:
    from dist2.compiled._records import Course

Tensors = Sequence[torch.Tensor]
Timeout = timedelta | float | None

_HERE = tuple(f"{Path(module).parent}/" for module in (__file__, torch.__file__))
"""Who calls is not to be found in these: what torch calls, a program called of torch."""


class Funnel(Outstanding):
    """The path of every operation of a group."""

    def __init__(self, spec: GroupSpec, backend: Backend) -> None:
        super().__init__(spec, backend)
        self._plans = Plans()
        self._course: Course | None = None
        if records is not None:
            # The two below in C, which leaves to them what is not the usual case.
            course = self._course = records.Course(
                group=self,
                otherwise=self._run,
                otherwise_beside=self._run_p2p,
                standing=self._standing,
                turns=self._lane,
                dispatch=dispatch,
                operation_type=Operation,
                seconds=seconds,
                here=_HERE,
                plans=self._plans,
                rank=self.info.rank,
            )
            # The methods below in C: an attribute of the object saves a frame in Python.
            self._run = course.run  # type: ignore[method-assign]  # in place of the method
            self._run_p2p = course.run_beside  # type: ignore[method-assign]  # in place of the method

    def _let_go(self) -> None:
        """After the group was closed: leave no cycles, so that it goes when nobody has it any more."""
        self._plans.clear()
        self.backend.on_revoked = ignore_revocation
        self._course = None
        for name in ("_run", "_run_p2p"):  # those below refuse calls as well
            self.__dict__.pop(name, None)

    @property
    def p2p_seq(self) -> int:
        """Number of the point-to-point operation issued last; the first is 1."""
        return self._lane.messages

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the limit of operations that name none."""
        self._standing.limit_ns = int(seconds(timeout) * 1e9)

    def _add_plan(self, signature: Signature, agreed: Hashable, inputs: Tensors, outputs: Tensors) -> Plan:
        """Have the backend prepare a signature, and keep the result for the next call like it."""
        prepare = self.backend.plan_plain if self._plans.plain(inputs, outputs) else self.backend.plan
        read = awaited(inputs)
        written = read if outputs is inputs else awaited(outputs)
        execute = on_copies(prepare(signature), signature, read, written)
        if read is not inputs or written is not outputs:
            execute = always_on(execute, read, written)  # such a plan is not kept
        plan = Plan(signature, execute)
        self._plans.keep(signature.kind, agreed, inputs, outputs, plan)
        return plan

    # Operations

    def _run(self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout) -> Work:
        """Run or issue a collective."""
        operation = self._begin(plan.signature, async_op, timeout)
        if self._standing.batches and (batch := self._standing.batches.get(get_ident())) is not None:
            return self._defer(batch, self._issue, plan, operation, inputs, outputs)
        lane = self._lane
        if (async_op and not self.backend.natively_async) or not (seq := lane.enter()):
            if not async_op:
                if not lane.let_go():
                    refuse_to_wait(operation)
            elif (course := self._course) is not None and not self.backend.natively_async:
                course.issuing = self._in_flight, self._left, Completion  # the next ones go in C
            work, done = self._pending(operation, outputs)
            self._issue(plan, work, done, inputs, outputs)
            return self._returned(work, done)
        operation.seq = seq
        try:
            pending = self._execute(plan, operation, inputs, outputs)
        finally:
            lane.leave()
            if self._standing.aborted:
                self._release()
        return self._work(operation, outputs, pending)

    def _run_p2p(
        self, plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout
    ) -> Work:
        """Run or issue a point-to-point operation: beside the lane, never behind a collective."""
        operation = self._begin(plan.signature, async_op, timeout)
        if self._standing.batches and (batch := self._standing.batches.get(get_ident())) is not None:
            return self._defer(batch, self._start_p2p, plan, operation, inputs, outputs)
        operation.seq = self._lane.number_message()
        lane = self._lane
        lane.enter_beside()
        try:
            pending = self._execute(plan, operation, inputs, outputs)
        finally:
            lane.leave_beside()
            if self._standing.aborted:
                self._release()
        return self._work(operation, outputs, pending)

    def _begin(self, signature: Signature, async_op: bool, timeout: Timeout) -> Operation:
        """Return the record of a new call, unless the group refuses calls."""
        if self._standing.fault is not None:
            raise self._refusal(self._standing.fault)
        limit_ns = self._standing.limit_ns if timeout is None else int(seconds(timeout) * 1e9)
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
            self._stumbled(operation, error, inputs, outputs)
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

    # What is not run by its caller

    def _issue(self, plan: Plan, work: Work, done: Completion, inputs: Tensors, outputs: Tensors) -> None:
        """Queue a collective on the lane, where a thread that waits for it may run it."""
        lane, ends_ns = self._lane, FOREVER_NS

        def help_out(until_ns: int) -> None:
            if until_ns >= ends_ns:  # it may take that long, and nothing ends it before
                lane.help(done.done)
            elif until_ns == PAST_NS:
                lane.hurry()

        work.helper = help_out
        start = partial(self._start, plan, work, done, inputs, outputs)
        ends_ns = lane.put(work.operation, start, self._left)

    def _left(self) -> None:
        """A job of the lane has ended."""
        if self._standing.aborted:
            self._release()

    def _start_p2p(self, plan: Plan, work: Work, done: Completion, inputs: Tensors, outputs: Tensors) -> None:
        """Start a point-to-point operation that was collected in a batch."""
        work.operation.seq = self._lane.number_message()
        self._start(plan, work, done, inputs, outputs)

    def _start(
        self, plan: Plan, work: Work, done: Completion, inputs: Tensors, outputs: Tensors
    ) -> BaseException | None:
        """Run an operation whose caller has gone on; those who wait for its Work get the outcome.

        Returns:
            An exception that concerns the calling thread as well: Ctrl-C, say.
        """
        if self._standing.fault is not None:
            refusal = self._refusal(self._standing.fault)
            self._spoil(work.operation, refusal, inputs, outputs)
            self._settle(work, done, refusal)
            return None
        dispatch.started(work.operation)
        work.operation.started_ns = monotonic_ns()
        try:
            pending = plan.execute(work.operation, inputs, outputs)
        except BaseException as error:  # noqa: BLE001 - it is delivered to whoever waits
            return self._broke_off(error, work, done, inputs, outputs)
        if pending is None:
            self._settle(work, done, None)
        else:
            self._follow(pending, work, done)
        return None

    def _broke_off(
        self, error: BaseException, work: Work, done: Completion, inputs: Tensors, outputs: Tensors
    ) -> BaseException | None:
        """Give the error of an operation to those who wait; return it if it concerns this thread as well."""
        self._spoil(work.operation, error, inputs, outputs)
        self._settle(work, done, error)
        return None if isinstance(error, Exception) else error

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

    # Batches

    def _open_batch(self) -> Batch:
        """Have the calling thread's operations collected until it calls `_close_batch`."""
        if get_ident() in self._standing.batches:
            raise InvalidUsageError(f"group {self.info.name!r} is already inside a coalescing block")
        batch = self._standing.batches[get_ident()] = Batch()
        return batch

    def _close_batch(self) -> Batch:
        """Return what the calling thread's operations were collected in; later ones run as ever."""
        batch = self._standing.batches.pop(get_ident(), None)
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
        done = Completion()
        combined = Work(batch.works[-1].operation, [t for work in batch.works for t in work.outputs], done)
        batch.when_done(done)
        combined.helper = batch.help
        if not async_op:
            combined.wait()
        return combined
