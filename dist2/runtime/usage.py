"""`Usage`: counts of connections by plane, and of requests to stores.

A metric reads the counts when it is scraped. A plane is ``data`` (links between ranks) or ``store``.
"""

from __future__ import annotations

import threading
from collections import Counter

from dist2.runtime.process import InChild, in_child


class Usage:
    """Counts since the start of the process, or since it was forked."""

    def __init__(self) -> None:
        self._opened: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._again: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._lock = threading.RLock()  # a signal handler may use a store while this thread counts

    def opened(self, plane: str) -> None:
        """Count a connection that was opened."""
        with self._lock:
            self._opened[plane] += 1

    def closed(self, plane: str) -> None:
        """Count a connection that was closed."""
        with self._lock:
            self._closed[plane] += 1

    def reconnected(self, plane: str) -> None:
        """Count a connection that took the place of a broken one, beside `opened`."""
        with self._lock:
            self._again[plane] += 1

    def requested(self, request: str) -> None:
        """Count a request to a store server. Without the lock: a lost count matters less than the time."""
        self._requests[request] += 1

    def connections(self) -> dict[str, tuple[int, int, int]]:
        """Return by plane how many connections are open, were opened, and took the place of a broken one."""
        with self._lock:
            return {
                plane: (count - self._closed[plane], count, self._again[plane])
                for plane, count in self._opened.items()
            }

    def requests(self) -> dict[str, int]:
        """Return how many requests were sent to stores, by request."""
        return dict(self._requests.copy())

    def forget(self) -> None:
        """Begin anew: the connections belong to the parent process."""
        self.__init__()  # type: ignore[misc]  # as if it had just been made

    def replace_lock(self) -> None:
        """Let this process count: a thread of the parent may have held the lock."""
        self._lock = threading.RLock()


usage = Usage()
"""That of this process."""


in_child(InChild.USAGE_LOCK)(usage.replace_lock)
in_child(InChild.USAGE)(usage.forget)
