"""A group's operations that complete later: held until then, and settled by whoever completes them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from dist2.backends.base import Backend, GroupSpec, Helped
from dist2.clock import FOREVER_NS, deadline_in
from dist2.completion import Completion
from dist2.ctrl_c import await_end
from dist2.operation import Operation
from dist2.outcomes import Outcomes, Tensors
from dist2.work import Work


class Outstanding(Outcomes):
    """Operations that were issued and are not complete."""

    def __init__(self, spec: GroupSpec, backend: Backend) -> None:
        super().__init__(spec, backend)
        self._in_flight: set[Work] = set()
        self._in_flight_lock = threading.Lock()

    @property
    def timeout_s(self) -> float:
        """The limit of operations that name none, in seconds."""
        return self._standing.limit_ns / 1e9

    def _pending(self, operation: Operation, outputs: Tensors) -> tuple[Work, Completion]:
        """Return a Work and what completes it; it is held until then, as torch's C++ may hold only half."""
        done = Completion()
        work = Work(operation, outputs, done)
        with self._in_flight_lock:
            self._in_flight.add(work)
        return work, done

    def queued(self) -> list[Operation]:
        """Return the operations that were issued and wait for their turn, oldest first."""
        with self._in_flight_lock:
            issued = [work.operation for work in list(self._in_flight)]  # at once: C takes no lock
        waiting = [each for each in issued if not each.started_ns and not each.finished_ns]
        return sorted(waiting, key=lambda operation: operation.created_ns)

    def _follow(self, pending: Future[None] | Helped, work: Work, done: Completion) -> None:
        """Settle an operation when the backend has completed it."""
        if isinstance(pending, Helped):
            work.helper = pending.help

        def ended(pending: Future[None] | Helped) -> None:
            error = pending.exception()
            if error is not None:
                self._spoil(work.operation, error, (), work.outputs)
            self._settle(work, done, error)

        pending.add_done_callback(ended)

    def _settle(self, work: Work, done: Completion, error: BaseException | None) -> None:
        """Complete an asynchronous operation: first its record, then those who wait for it."""
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
            pending = [work._pending for work in list(self._in_flight) if work._pending is not None]
        return all(await_end(each, deadline_ns) for each in pending)

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
