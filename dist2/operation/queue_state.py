"""`QueueState`: the turn of a group's collectives, and their sequence numbers.

Theory of operation: collectives of a group run one at a time, in the order issued. The thread that runs one
holds the *turn*. A thread that finds the turn free takes it and runs its collective inline (`enter`).
Otherwise the operation is queued (`issue`), and runs in the first of these threads: the holder of the turn,
the caller as it waits, or the queue's own thread, which first gives the caller `PATIENCE_S`. Messages
take no turn; they are only counted (`enter_beside`), so that closing a group waits for them.

It is the state of a `CollectiveQueue`: a type in C where the extension is built, and `PythonQueueState`
elsewhere; both behave alike. Each method is one atomic step.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING

from dist2.compiled import records
from dist2.runtime.signals import OnCtrlC, on_ctrl_c

PATIENCE_S = 250e-6
"""Time, in seconds, for the caller to run its queued operation itself before the queue's thread does."""


@on_ctrl_c(OnCtrlC.DEFER)
class PythonQueueState:
    """One thread has the turn; others queue for it, or are inside an operation that takes no turn.

    Attributes:
        seq: Number of the collective issued last; the first is 1.
        messages: Number of the message issued last; the first is 1.
        drainers: Number of threads that wait until the queue is empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seq = 0
        self.messages = 0
        self.drainers = 0
        self._queued = 0
        self._beside = 0
        self._busy = False
        self._holder = 0
        self._retired = False
        self._ending = False
        self._ready = 0.0
        self._patience_s = 0.0
        self._steps = threading.Lock()
        self._roused = threading.Condition(self._steps)

    @property
    def idle(self) -> bool:
        """Whether the turn is free and nothing is queued."""
        return not self._busy and not self._queued

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._busy and self._holder == threading.get_ident()

    @property
    def empty(self) -> bool:
        """Whether no thread is inside an operation, and nothing is queued."""
        return self.idle and not self._beside

    def enter(self) -> int:
        """Take the turn if it is free and nothing is queued. Return the operation's number, or else 0."""
        with self._steps:
            if self._busy or self._queued:
                return 0
            self._holder, self._busy = threading.get_ident(), True
            self.seq = seq = self.seq + 1
            return seq

    def left(self) -> bool:
        """Give the turn back. Return whether a thread waits for it, or for the queue to become empty."""
        with self._steps:
            self._busy = False
            if self._queued:
                self._rouse(0.0)
            return self._queued > 0 or self.drainers > 0

    def lay_down(self) -> bool:
        """Like `left`, where the same thread is likely to take the turn again soon."""
        with self._steps:
            self._busy = False
            if self._queued:
                self._rouse(PATIENCE_S)
            return self._queued > 0 or self.drainers > 0

    def pass_on(self) -> bool:
        """Pop the next queued job without releasing the turn. Return False if the queue is empty."""
        with self._steps:
            if not self._queued:
                return False
            self._queued -= 1
            return True

    def enter_beside(self) -> None:
        """Note that a thread is inside an operation that takes no turn."""
        with self._steps:
            self._beside += 1

    def leave_beside(self) -> None:
        """Note that it has left."""
        with self._steps:
            self._beside -= 1

    def number_message(self) -> int:
        """Return the number of a message, which takes no turn."""
        with self._steps:
            self.messages += 1
            return self.messages

    def issue(self) -> int:
        """Queue an operation. Return its number."""
        with self._steps:
            self._queued += 1
            self.seq += 1
            if not self._busy:  # else the thread that holds the turn runs it when it is done
                self._rouse(PATIENCE_S)
            return self.seq

    def enter_queued(self) -> bool:
        """Take the turn for the oldest queued job. Return False if there is none, or the turn is taken."""
        with self._steps:
            if self._busy or not self._queued:
                return False
            self._queued -= 1
            self._holder, self._busy = threading.get_ident(), True
            return True

    def await_job(self, idle_s: float) -> bool:
        """Wait until a queued job could run and its caller does not run it.

        Returns:
            Whether there is such a job; False if there was none for ``idle_s`` seconds, or after `end`.
        """
        with self._steps:
            while self._queued or not self._ending:
                if self._queued and not self._busy:
                    left_s = self._ready + self._patience_s - monotonic()
                    if left_s <= 0:
                        return True
                    self._roused.wait(left_s)
                elif not self._roused.wait(idle_s) and not self._queued:
                    return False
            return False

    def hurry(self) -> None:
        """Have `await_job` return at once if something is queued: its caller will not run it."""
        with self._steps:
            if self._queued and not self._busy:
                self._rouse(0.0)

    def end(self) -> None:
        """Have `await_job` return once nothing is queued."""
        with self._steps:
            self._ending = True
            self._rouse(0.0)

    def _rouse(self, patience_s: float) -> None:
        self._ready, self._patience_s = monotonic(), patience_s
        self._roused.notify()

    def close(self) -> bool:
        """Close if no thread is inside and nothing is queued. True once, for the caller that cleans up."""
        with self._steps:
            if self._busy or self._queued or self._beside or self._retired:
                return False
            self._retired = True
            return True


if TYPE_CHECKING:
    QueueState = PythonQueueState
else:
    QueueState = PythonQueueState if records is None else records.QueueState
