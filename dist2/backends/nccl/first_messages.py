"""`FirstMessages`: issues the messages of one direction until their ranks are connected.

NCCL connects two ranks in the first calls that name each other, and each of these calls blocks until the
other rank has made its own. Two ranks that each start a send and then a receive would block each other for
ever. So a message to a rank that is not connected is issued by a thread, and so are those behind it, in their
order. The next ones are issued by their callers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dist2.runtime.threads import Worker


class FirstMessages:
    """The messages of a group in one direction, over one communicator.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: deque[tuple[set[int], Callable[[], None]]] = deque()
        self._connected: set[int] = set()
        self._thread: Worker | None = None

    def take(self, peers: set[int], issue: Callable[[], None]) -> bool:
        """Have the thread issue messages; False where the caller can do so without blocking.

        Args:
            peers: The other ranks of the messages.
            issue: Issues them; must not raise.
        """
        with self._lock:
            if not self._queue and peers <= self._connected:
                return False
            self._queue.append((peers, issue))
            if self._thread is None:
                self._thread = Worker(self._name, self._run)
                self._thread.start()
            return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                peers, issue = self._queue[0]  # stays there until it is issued: later ones are behind it
            issue()
            with self._lock:
                self._queue.popleft()
                self._connected |= peers

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, whose communicator was aborted."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
