"""`Lane`: the numbers and the order of one group's collectives.

A synchronous collective on an idle group runs in the thread that calls it. Only what is asynchronous,
or finds the lane busy, goes to the lane's thread; either way operations start in the order of their
numbers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from dist2.clock import deadline_in, remaining_s
from dist2.ctrl_c import wait_for
from dist2.operation import Operation
from dist2.turns import Turns
from dist2.worker import Worker

IDLE_S = 5.0
"""How long a lane's thread outlives its last job: groups that never go asynchronous have none."""

_LOOK_S = 0.001

Job = Callable[[], None]
"""What a lane's thread runs. It must not raise."""


class Lane(Turns):
    """Serialises the collectives of one group.

    Attributes:
        seq: Number of the collective issued last; the first is 1.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._mutex = threading.Lock()
        self._wake = threading.Condition(self._mutex)
        self._drained = threading.Condition(self._mutex)
        self._jobs: deque[tuple[Job, Job]] = deque()
        self._thread: Worker | None = None
        self._ending = False

    def leave(self) -> None:
        """Give the lane back: to the thread if jobs came meanwhile."""
        if self.left():
            self.hand_on()

    def hand_on(self) -> None:
        """Wake whoever waits for the lane, which was given back."""
        with self._mutex:
            if self._jobs:
                self._wake.notify()
            else:
                self._drained.notify_all()

    def retire(self) -> bool:
        """Whether nobody is inside or queued any more: True once, for whoever cleans up; its thread ends."""
        first = self.close()
        if first:
            with self._mutex:
                self._ending = True
                self._wake.notify_all()
        return first

    def put(self, operation: Operation, job: Job, left: Job) -> None:
        """Number an operation and have the lane's thread run its job after everything issued before.

        Args:
            operation: Gets its number.
            job: Runs on the thread.
            left: Runs there afterwards, with the lane left.
        """
        with self._mutex:
            operation.seq = self.issue()
            self._jobs.append((job, left))
            if self._thread is None:
                self._thread = Worker(f"dist2-lane-{self._name}", self._run)
                self._thread.start()
            else:
                self._wake.notify()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer than ``timeout_s``."""
        with self._mutex:
            self.drainers += 1
        try:
            return wait_for(self._drained, lambda: self.idle, deadline_in(timeout_s))
        finally:
            with self._mutex:
                self.drainers -= 1

    def await_empty(self, deadline_ns: int) -> bool:
        """Wait until nobody is inside or queued, messages included; False if that took too long.

        For a group that was aborted: whoever is inside is about to leave.
        """
        while not self.empty:
            if not remaining_s(deadline_ns):
                return False
            time.sleep(_LOOK_S)
        return True

    def stop(self) -> None:
        """End the thread once its jobs are done; a later `put` would start another."""
        with self._mutex:
            thread, self._ending = self._thread, True
            self._wake.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(IDLE_S)

    def _run(self) -> None:
        while (found := self._next()) is not None:
            job, left = found
            job()
            self.leave()
            left()
            del found, job, left  # they hold the tensors, and the next wait may be long

    def _next(self) -> tuple[Job, Job] | None:
        with self._mutex:
            while not self.enter_queued():
                if self._ending and not self._jobs:
                    self._thread = None
                    return None
                woken = self._wake.wait(IDLE_S)
                if not woken and not self._jobs:
                    self._thread = None
                    return None
            return self._jobs.popleft()
