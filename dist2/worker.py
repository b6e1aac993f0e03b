"""`Worker`: a thread that may be inside torch's C++ when the interpreter ends.

A daemon thread that finds the interpreter gone as it comes back from C++ takes the process down
(``terminate called without an active exception``). So the end of the interpreter waits a moment for
these threads, once whatever they were waiting for was aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dist2.clock import remaining_s


class Worker(threading.Thread):
    """A daemon thread that completes operations, or destroys what C++ holds."""

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)


def join_workers(deadline_ns: int) -> None:
    """Wait for all workers of this process to end; the caller has told them to."""
    for thread in threading.enumerate():
        if isinstance(thread, Worker):
            thread.join(remaining_s(deadline_ns))
