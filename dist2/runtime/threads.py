"""`Worker`: a thread that may be inside torch's C++ when the interpreter ends.

A daemon thread that returns from C++ after the interpreter has ended takes the process down
(``terminate called without an active exception``). So the end of the interpreter waits a moment for
these threads, after the operations that they wait for were aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dist2.runtime.deadline import remaining_s


class Worker(threading.Thread):
    """A daemon thread that completes operations, or destroys C++ objects.

    Args:
        name: The thread's name.
        target: The function that it runs.
        args: The function's arguments.
        end: Asks the thread to end soon; does nothing where closing all groups ends it.
    """

    def __init__(
        self, name: str, target: Callable[..., None], *args: Any, end: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)
        self.end = end


def end_workers(deadline_ns: int) -> None:
    """Have all workers of this process end, and wait for them; all groups are closed."""
    workers = [thread for thread in threading.enumerate() if isinstance(thread, Worker)]
    for worker in workers:
        if worker.end is not None:
            worker.end()
    for worker in workers:
        worker.join(remaining_s(deadline_ns))
