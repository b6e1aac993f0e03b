"""What may come between any two steps of a thread: signal handlers, destructors, callbacks.

Such code may find its own thread in the midst of a change, with a lock held that it would wait for for
ever. What needs locks is then done aside, on a thread of its own, as soon as the change is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from types import FrameType

from dist2.worker import Worker

_OURS = frozenset({"dist2", "observability"})
_DOORS = frozenset(
    f"dist2.{name}"
    for name in ("interrupts", "group", "backend_view", "open_groups", "context", "legacy", "bench", "cli")
)
"""Modules whose functions hold no lock while they call for the end of a group."""


def in_the_midst(depth: int = 1) -> bool:
    """Whether the calling thread is inside something of this library, which may hold locks.

    Args:
        depth: How many callers not to ask: by default the one who asks.
    """
    frame: FrameType | None = _getframe(depth + 1)
    while frame is not None:
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        if package in _OURS and f"{package}.{rest.partition('.')[0]}" not in _DOORS:
            return True
        frame = frame.f_back
    return False


def aside(name: str, call: Callable[[], None]) -> None:
    """Call what takes locks: here, or on a thread of its own where this one may hold them already.

    Args:
        name: Of the thread.
        call: It must not raise.
    """
    if in_the_midst(2):
        Worker(name, call).start()
    else:
        call()
