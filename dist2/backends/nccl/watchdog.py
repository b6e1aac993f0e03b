# cython: annotation_typing=False
"""`Watchdog`: a thread of a group that sees operations on the device end, or fail.

It holds the tickets of all operations on the device, by stream in the order of launches. While there are
some, it waits for the oldest over the control links (see `Controlled`), where deaths, mismatches and
aborts are reported, and checks deadlines and NCCL's asynchronous errors. A failure breaks the
group: then the communicators are aborted, which frees the device, and all tickets fail. The thread ends
when there has been nothing to watch for a while.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from threading import get_ident
from time import monotonic_ns

from dist2.backends.nccl.ticket import Ticket, again
from dist2.errors import BackendError
from dist2.runtime.built import check_built
from dist2.runtime.deadline import FOREVER_NS, remaining_s
from dist2.runtime.threads import Worker

check_built(__name__, __file__)

IDLE_S = 5.0
LOOK_NS = 10_000_000
"""Interval between two looks at the device. A watchdog that looks more often takes the interpreter from
threads that launch operations, for several times as long as a launch takes."""
_ASYNC_NS = 100_000_000
"""How often NCCL is asked for asynchronous errors."""
_DRAIN_S = 0.02

Wait = Callable[[Callable[[], bool], Ticket, int], None]
"""Waits until a predicate is true, at the latest until a deadline, for one ticket; raises the error that
breaks the group."""


class Watchdog:
    """Watches the tickets of one group.

    Args:
        name: The group's.
        wait: See `Wait`.
        wake: Wakes it.
        async_error: Returns NCCL's asynchronous error, or None.
        broken: Called with an error that breaks the group; aborts the communicators, returns the first error.
        prepare: Called by each thread that watches, first.
    """

    def __init__(
        self,
        name: str,
        wait: Wait,
        wake: Callable[[], None],
        async_error: Callable[[], BackendError | None],
        broken: Callable[[BaseException], BaseException],
        prepare: Callable[[], None],
    ) -> None:
        self._prepare = prepare
        self._name = name
        self._wait = wait
        self._wake = wake
        self._async_error = async_error
        self._broken = broken
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queues: dict[int, deque[Ticket]] = {}
        self._soonest_ns = FOREVER_NS
        self._has_sooner = False
        self._thread: Worker | None = None
        self._watching = 0  # the identifier of that thread
        self._ends = False
        self._asked_ns = 0

    def watch(self, ticket: Ticket) -> None:
        """Watch an operation that is put on the device."""
        with self._lock:
            was_idle = not self._queues
            try:
                self._queues[ticket.handle].append(ticket)
            except KeyError:
                self._queues[ticket.handle] = deque((ticket,))
            if ticket.operation.deadline_ns < self._soonest_ns:
                self._has_sooner = True
            if self._thread is None or self._watching == get_ident():
                self._start()
            if was_idle:
                self._changed.notify_all()

    def relieve(self) -> None:
        """Have another thread watch if this is the one that does.

        It is in a callback then, which may wait for operations that only a watching thread can settle.
        """
        if self._watching == get_ident():
            self._start()

    def _start(self) -> None:
        self._thread = Worker(f"dist2-nccl-watch-{self._name}", self._run, end=self.stop)
        self._thread.start()
        self._watching = self._thread.ident or 0

    def drain(self, deadline_ns: int) -> bool:
        """Wait until nothing is left to watch; False if that took too long."""
        with self._changed:
            while self._queues and remaining_s(deadline_ns):
                self._changed.wait(min(_DRAIN_S, remaining_s(deadline_ns)))
            return not self._queues

    def fail(self, error: BaseException) -> None:
        """Fail all tickets, each with a copy of the error."""
        with self._changed:
            queues, self._queues = self._queues, {}
            self._changed.notify_all()
        for ticket in (each for queue in queues.values() for each in queue):
            ticket.settle(again(error))

    def stop(self) -> None:
        """End the thread soon."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._wake()

    def close(self) -> None:
        """End the thread, and wait for that, unless this is it."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(IDLE_S)

    # The thread

    def _run(self) -> None:
        self._prepare()
        while self._thread is threading.current_thread() and (ticket := self._next()) is not None:
            is_time = partial(self._is_time, ticket, monotonic_ns() + LOOK_NS)
            try:
                self._wait(is_time, ticket, self._soonest_ns)
            except Exception as error:  # noqa: BLE001 - it breaks the group, and is raised in all waiters
                self.fail(self._broken(error))
            self.sweep()

    def _next(self) -> Ticket | None:
        """Return the oldest operation, once there is one; None when the thread is to end."""
        with self._changed:
            if not self._queues and not self._ends:
                self._changed.wait(IDLE_S)
            if self._queues and not self._ends:
                self._has_sooner = False
                every = (each for queue in self._queues.values() for each in queue)
                self._soonest_ns = min(each.operation.deadline_ns for each in every)
                return min((queue[0] for queue in self._queues.values()), key=_age)
            self._thread, self._watching = None, 0
            return None

    def _is_time(self, ticket: Ticket, looks_ns: int) -> bool:
        """Whether to check all tickets: from ``looks_ns`` on if this one is over; raises NCCL's asynchronous
        error."""
        now = monotonic_ns()
        if now - self._asked_ns > _ASYNC_NS:
            self._asked_ns = now
            error = self._async_error()
            if error is not None:
                raise error
        return self._ends or self._has_sooner or (now >= looks_ns and ticket.passed())

    def sweep(self) -> None:
        """Settle the operations that the device has done: of each stream the first ones, in its order."""
        done = []
        with self._changed:
            for handle, queue in list(self._queues.items()):
                done.extend([queue.popleft() for _ in range(_count_passed(queue))])
                if not queue:
                    del self._queues[handle]
        for ticket in done:
            ticket.settle()
            ticket.recycle()
        with self._changed:
            self._changed.notify_all()


def _count_passed(queue: Iterable[Ticket]) -> int:
    """Return how many of the first operations of a stream are over.

    A stream runs them in their order, so few are asked: each question lets another thread have the
    interpreter, and then waits for it.
    """
    placed = list(takewhile(lambda ticket: ticket.is_placed(), queue))
    try:
        return bisect_left(placed, True, key=lambda ticket: not ticket.passed())
    except RuntimeError:  # the device has failed, which the thread that waits for these has met as well
        return 0


def _age(ticket: Ticket) -> int:
    return ticket.operation.created_ns
