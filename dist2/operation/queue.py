"""`CollectiveQueue`: the numbers and the order of one group's collectives.

Theory of operation: collectives of a group run one at a time, in the order issued. The thread that runs one
holds the *turn*. A thread that finds the turn free takes it and runs its collective inline (`enter`).
Otherwise, and for every asynchronous call, the operation is queued (`issue`), and runs in the first of these
threads: the holder of the turn, a thread that waits for it, which first runs those queued before it, or the
queue's own thread, which first gives the caller `PATIENCE_S`. Messages take no turn; they are only counted
(`enter_beside`), so that closing a group waits for them.

The turn and the numbers are a `QueueState` in C, the base of the queue: each of its methods is one atomic
step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cached_property
from threading import get_ident
from weakref import WeakValueDictionary

from dist2.compiled import records
from dist2.errors import InvalidUsageError
from dist2.operation.signature import GroupInfo, Operation
from dist2.runtime.deadline import deadline_in, remaining_s
from dist2.runtime.signals import OnCtrlC, on_ctrl_c, wait_for
from dist2.runtime.threads import Worker

PATIENCE_S = 250e-6
"""Time, in seconds, for the caller to run its queued operation itself before the queue's thread does."""


IDLE_S = 5.0
"""Time that the thread of a queue outlives its last job: groups that never go asynchronous have none."""

_LOOK_S = 0.001

Job = Callable[[], "BaseException | None"]
"""A queued job. It must not raise; it returns an exception for the thread that ran it (Ctrl-C), or None."""
Left = Callable[[], None]
"""Called after a job, once the thread has left the queue."""


@on_ctrl_c(OnCtrlC.DEFER)
class CollectiveQueue(records.QueueState):
    """Serialises the collectives of one group.

    Attributes:
        seq: Number of the collective issued last; the first is 1.
    """

    def __init__(self, name: str, info: GroupInfo | None = None) -> None:
        super().__init__()
        self._name = name
        self._mutex = threading.Lock()
        self._jobs: deque[tuple[Job, Left, Operation]] = deque()
        self._inside = 0
        self._running: Operation | None = None
        self._ends_ns = 0
        self._thread: Worker | None = None
        self._turned_away = False
        if info is not None:
            _queues[info.uid, info.rank] = self

    @cached_property
    def _drained(self) -> threading.Condition:
        """Notified when the queue is empty; made on demand, since most queues are never awaited."""
        return threading.Condition(self._mutex)

    def leave(self) -> None:
        """Give the turn back: to the queue's thread if jobs were queued meanwhile."""
        if self.left():
            self.hand_on()

    def hand_on(self) -> None:
        """Wake threads that wait until the queue is empty, after the turn was given back."""
        with self._mutex:
            if not self._jobs:
                self._drained.notify_all()

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
            RuntimeError: The process may start no more threads; nothing is queued.
        """
        with self._mutex:
            if self._thread is None:
                self._start_thread()
            self._ends_ns = max(self._ends_ns if self._jobs else 0, operation.deadline_ns)
            self._jobs.append((job, left, operation))
            operation.seq = self.issue()
            return self._ends_ns

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
        mine = self._work_off(lambda error: not done() and error is None and self.pass_on())
        if mine is not None:
            raise mine

    def hurry(self) -> None:
        """Start queued jobs at once: their caller will not run them itself, but may wait for them."""
        if not self.let_go():
            super().hurry()

    def let_go(self) -> bool:
        """Give up the turn if the calling thread has it and is in a callback of a complete operation.

        Such a callback may wait for queued operations, which another thread then runs.
        """
        if self._inside != get_ident() or self._running is None or not self._running.finished_ns:
            return False
        with self._mutex:
            if self._thread is threading.current_thread():  # it is in the callback for as long as that takes
                self._start_thread()
        self._inside = 0
        self.leave()
        return True

    def _start_thread(self) -> None:
        before, self._thread = self._thread, Worker(f"dist2-collectives-{self._name}", self._run)
        try:
            self._thread.start()
        except BaseException:
            self._thread = before  # else no thread would try again
            raise

    def _work_off(self, goes_on: Callable[[BaseException | None], bool]) -> BaseException | None:
        """Run queued jobs, holding the turn, while ``goes_on``; return the last job's exception."""
        again, me = True, get_ident()
        while again:
            with self._mutex:  # `put` numbers the operation under this lock
                job, left, self._running = self._jobs.popleft()
            self._inside = me
            mine = job()
            again = self._inside == me and goes_on(mine)  # else the turn was given away
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
        with self._mutex:
            self.drainers += 1
        try:
            return wait_for(self._drained, lambda: self.idle, deadline_in(timeout_s))
        finally:
            with self._mutex:
                self.drainers -= 1

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
        with self._mutex:
            thread = self._thread
        self.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(IDLE_S)

    def _run(self) -> None:
        while self._is_awaited():
            if self.enter_queued():  # else another thread was faster
                self._work_off(self._goes_on)
                if self._thread is not threading.current_thread():  # another has taken its place
                    return

    def _goes_on(self, error: BaseException | None) -> bool:
        """Whether the thread runs the next job as well: not if another thread wants to."""
        if self._turned_away:
            self._turned_away = False
            return False
        return self.pass_on()

    def _is_awaited(self) -> bool:
        """Wait for a job; False after a long time without one, so that the thread may end."""
        while not self.await_job(IDLE_S):
            with self._mutex:
                if not self._jobs:
                    self._thread = None
                    return False
        return True


_queues: WeakValueDictionary[tuple[str, int], CollectiveQueue] = WeakValueDictionary()
"""The queues of this process's groups, by the group's identity and rank, for Works of these groups."""


@on_ctrl_c(OnCtrlC.DEFER)
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
