# cython: annotation_typing=False
"""`CollectiveQueue`: the numbers and the order of one group's collectives.

Theory of operation: collectives of a group run one at a time, in the order issued. The thread that runs one
holds the *turn*. A thread that finds the turn free takes it and runs its collective inline (`enter`).
Otherwise, and for every asynchronous call, the operation is queued (`issue`), and runs in the first of these
threads: the holder of the turn, a thread that waits for it, which first runs those queued before it, or the
queue's own thread, which first gives the caller a moment (`PATIENCE_NS` in turn.h). Messages take no turn;
they are only counted (`enter_beside`), so that closing a group waits for them.

The turn and the numbers are plain C (dist2/core/turn.h), and this module is compiled: each method of
`QueueState` is one atomic step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import cython
from cython.cimports.dist2.operation.turn import (
    PATIENCE_NS,
    add_job,
    await_job,
    end_turn,
    enter_queued,
    enter_turn,
    give_back,
    hurry_turn,
    is_held_here,
    is_idle,
    take_next,
)

from dist2.errors import InvalidUsageError
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.built import check_built
from dist2.runtime.deadline import deadline_in, remaining_s
from dist2.runtime.resources import scarce_resources
from dist2.runtime.signals import wait_for
from dist2.runtime.threads import Worker

check_built(__name__, __file__)


IDLE_S = 5.0
"""Time that the thread of a queue outlives its last job: groups that never go asynchronous have none."""

_LOOK_S = 0.001

Job = Callable[[], "BaseException | None"]
"""A queued job. It must not raise; it returns an exception for the thread that ran it (Ctrl-C), or None."""
Left = Callable[[], None]
"""Called after a job, once the thread has left the queue."""


class QueueState:
    """One thread has the turn; others queue for it, or are inside an operation that takes no turn."""

    turn: Any

    @property
    def seq(self) -> int:
        """Number of the collective issued last; the first is 1."""
        return int(self.turn.seq)

    @property
    def messages(self) -> int:
        """Number of the message issued last; the first is 1."""
        return int(self.turn.messages)

    @property
    def idle(self) -> bool:
        """Whether the turn is free and nothing is queued."""
        return bool(is_idle(cython.address(self.turn)))

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread has the turn."""
        return bool(is_held_here(cython.address(self.turn)))

    @property
    def empty(self) -> bool:
        """Whether no thread is inside an operation, and nothing is queued."""
        return bool(is_idle(cython.address(self.turn))) and not self.turn.beside

    @property
    def drainers(self) -> int:
        """Number of threads that wait until the queue is empty."""
        return int(self.turn.drainers)

    @drainers.setter
    def drainers(self, drainers: int) -> None:
        self.turn.drainers = drainers

    def enter(self) -> int:
        """Take the turn if it is free and nothing is queued. Return the operation's number, or else 0."""
        return int(enter_turn(cython.address(self.turn)))

    def left(self) -> bool:
        """Give the turn back. Return whether a thread waits for it, or for the queue to become empty."""
        return bool(give_back(cython.address(self.turn), 0))

    def lay_down(self) -> bool:
        """Like `left`, where the same thread is likely to take the turn again soon."""
        return bool(give_back(cython.address(self.turn), PATIENCE_NS))

    def pass_on(self) -> bool:
        """Pop the next queued job without releasing the turn. Return False if the queue is empty."""
        return bool(take_next(cython.address(self.turn)))

    def enter_beside(self) -> None:
        """Note that a thread is inside an operation that takes no turn."""
        self.turn.beside += 1

    def leave_beside(self) -> None:
        """Note that it has left."""
        self.turn.beside -= 1

    def number_message(self) -> int:
        """Return the number of a message, which takes no turn."""
        self.turn.messages += 1
        return int(self.turn.messages)

    def issue(self) -> int:
        """Queue an operation. Return its number."""
        return int(add_job(cython.address(self.turn)))

    def enter_queued(self) -> bool:
        """Take the turn for the oldest queued job. Return False if there is none, or the turn is taken."""
        return bool(enter_queued(cython.address(self.turn)))

    def await_job(self, idle_s: float) -> bool:
        """Wait until a queued job could run and its caller does not run it.

        Returns:
            Whether there is such a job; False if there was none for ``idle_s`` seconds, or after `end`.
        """
        idle_ns = cython.declare(cython.longlong, int(idle_s * 1e9))
        found = cython.declare(cython.bint)
        with cython.nogil:
            found = await_job(cython.address(self.turn), idle_ns)
        return bool(found)

    def hurry(self) -> None:
        """Have `await_job` return at once if something is queued: its caller will not run it."""
        hurry_turn(cython.address(self.turn))

    def end(self) -> None:
        """Have `await_job` return once nothing is queued."""
        end_turn(cython.address(self.turn))

    def close(self) -> bool:
        """Close if no thread is inside and nothing is queued. True once, for the caller that cleans up."""
        if not self.empty or self.turn.retired:
            return False
        self.turn.retired = True
        return True


class CollectiveQueue(QueueState):
    """Serialises the collectives of one group."""

    def __init__(self, name: str, info: GroupInfo | None = None) -> None:
        self._name = name
        self._jobs: list[tuple[Job, Left, Operation]] = []
        self._inside = 0
        self._running: Operation | None = None
        self._ends_ns = 0
        self._thread: Worker | None = None
        self._starting = False
        self._turned_away = False
        self._drained: threading.Condition | None = None  # made on demand: most queues are never awaited
        if info is not None:
            _queues[info.uid, info.rank] = self

    def leave(self) -> None:
        """Give the turn back: to the queue's thread if jobs were queued meanwhile."""
        if self.left():
            self.hand_on()

    def hand_on(self) -> None:
        """Wake threads that wait until the queue is empty, after the turn was given back."""
        drained = self._drained
        if drained is not None and not self._jobs:
            with drained:
                drained.notify_all()

    def retire(self) -> bool:
        """Close the queue if it is empty. True once, for the caller that is to clean up; ends the thread."""
        first = self.close()
        if first:
            self.end()
        return first

    def put(self, operation: Operation, job: Job, left: Left) -> int:
        """Number an operation and have its job run after everything issued before: see `help`.

        Args:
            operation: Gets its number.
            job: Runs once.
            left: Runs on the same thread afterwards, with the turn given back or kept for the next job.

        Returns:
            By when the limits end all that was queued up to this.

        Raises:
            ResourceError: The process may start no more threads; nothing is queued.
        """
        entry = (job, left, operation)
        while self._thread is None and not self._starting:  # a thread may end before it gets a job
            self._start_thread()
        # From here on nothing is called that could let another thread run: a job has the place of its number.
        self._ends_ns = max(self._ends_ns if self._jobs else 0, operation.deadline_ns)
        self._jobs.append(entry)
        operation.seq = self.turn.seq + 1  # first: the thread may run the job at once
        self.issue()
        return int(self._ends_ns)

    def help(self, done: Callable[[], bool]) -> None:
        """Run queued jobs in order until ``done()`` is true, none is left, or another thread runs them.

        Raises:
            BaseException: Returned by a job.
        """
        if done():
            return
        if not self.enter_queued() and not (self.let_go() and self.enter_queued()):
            self._turned_away = True
            return
        mine = self._work_off(done)
        if mine is not None:
            raise mine

    def hurry(self) -> None:
        """Start queued jobs at once: their caller will not run them itself, but may wait for them."""
        if not self.let_go():
            hurry_turn(cython.address(self.turn))

    def let_go(self) -> bool:
        """Give up the turn if the calling thread has it and is in a callback of a complete operation.

        Such a callback may wait for queued operations, which another thread then runs.
        """
        if self._inside != get_ident() or self._running is None or not self._running.finished_ns:
            return False
        if self._thread is threading.current_thread():  # it is in the callback for as long as that takes
            self._start_thread()
        self._inside = 0
        self.leave()
        return True

    def _start_thread(self) -> None:
        before, self._starting = self._thread, True
        try:
            self._thread = Worker(f"dist2-collectives-{self._name}", self._run)
            with scarce_resources():
                self._thread.start()
        except BaseException:
            self._thread = before  # else no thread would try again
            raise
        finally:
            self._starting = False

    def _work_off(self, done: Callable[[], bool] | None) -> BaseException | None:
        """Run queued jobs, holding the turn; return the last job's exception.

        Args:
            done: Stop when it is true, or a job returned an exception. None, in the queue's own thread: stop
                if another thread wants to run the next.
        """
        again, me = True, get_ident()
        while again:
            job, left, self._running = self._jobs.pop(0)
            self._inside = me
            mine = job()
            again = self._inside == me and self._goes_on(done, mine)  # else the turn was given away
            if not again and self._inside == me:
                self._inside = 0
                if self.lay_down():
                    self.hand_on()
            left()
            del job, left  # they hold the tensors, and the next wait may be long
        return mine

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer than ``timeout_s``."""
        if self.idle:
            return True
        if self._drained is None:
            self._drained = threading.Condition()
        self.turn.drainers += 1
        try:
            return wait_for(self._drained, lambda: self.idle, deadline_in(timeout_s))
        finally:
            self.turn.drainers -= 1

    def await_empty(self, deadline_ns: int) -> bool:
        """Wait until no operation runs or is queued, messages included; False at the deadline.

        For a group that was aborted: the thread inside is about to leave.
        """
        while not self.empty:
            if not remaining_s(deadline_ns):
                return False
            time.sleep(_LOOK_S)
        return True

    def stop(self) -> None:
        """End the thread once its jobs are done; a later `put` would start another."""
        thread = self._thread
        self.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(IDLE_S)

    def _run(self) -> None:
        while self._is_awaited():
            if self.enter_queued():  # else another thread was faster
                self._work_off(None)
                if self._thread is not threading.current_thread():  # another has taken its place
                    return

    def _goes_on(self, done: Callable[[], bool] | None, error: BaseException | None) -> bool:
        """Whether the thread runs the next job as well."""
        if done is not None:
            return not done() and error is None and self.pass_on()
        if self._turned_away:
            self._turned_away = False
            return False
        return self.pass_on()

    def _is_awaited(self) -> bool:
        """Wait for a job; False after a long time without one, so that the thread may end."""
        while not self.await_job(IDLE_S):
            if not self._jobs:
                self._thread = None
                return False
        return True


_queues: WeakValueDictionary[tuple[str, int], CollectiveQueue] = WeakValueDictionary()
"""The queues of this process's groups, by the group's identity and rank, for Works of these groups."""


def refuse_to_wait(operation: Operation) -> None:
    """Raise if an operation is queued behind one that this thread runs: to wait for it would deadlock.

    The caller is then a signal handler, a destructor or a callback that interrupted the running operation.

    Raises:
        InvalidUsageError: This thread runs an earlier operation.
    """
    group = operation.signature.group
    queue = _queues.get((group.uid, group.rank))
    if queue is not None and queue.is_held_here:
        raise InvalidUsageError(
            f"{operation.describe()} cannot be waited for here: this thread is in the midst of another "
            f"operation of group {group.name!r}, which this signal handler, destructor or callback holds up; "
            f"pass async_op=True, and wait when it has returned",
            group=group.name,
            op=operation.signature.kind.value,
            rank=group.rank,
        )
