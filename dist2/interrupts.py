"""What may come between any two steps of a thread: signal handlers, destructors, callbacks.

Such code may find its own thread in the midst of a change, with a lock held that it would wait for for
ever. What needs locks is then done aside, on a thread of its own, as soon as the change is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from types import FrameType

from dist2.operation import GroupInfo
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
        depth: How many frames of the stack to leave out: by default that of the caller.
    """
    frame: FrameType | None = _getframe(depth + 1)
    while frame is not None:
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        if package in _OURS and f"{package}.{rest.partition('.')[0]}" not in _DOORS:
            return True
        frame = frame.f_back
    return False


_RUNNING = frozenset({"dist2.collectives", "dist2.runner"})
"""Modules whose methods run operations of a group."""
_RUNNING_QUEUED = "dist2.lane", "_work_off"
"""The one method elsewhere that does: what it calls may be in C."""


def in_the_midst_of(info: GroupInfo) -> bool:
    """Whether the calling thread was already inside an operation of a group when it made this call.

    Then it is in a signal handler, a destructor or a callback, and would wait for that operation for ever.

    Args:
        info: Says which group.
    """
    frame: FrameType | None = _getframe(1)
    while frame is not None and _package(frame) in _OURS:  # this call itself
        frame = frame.f_back
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module in _RUNNING or (module, frame.f_code.co_name) == _RUNNING_QUEUED:
            other = getattr(frame.f_locals.get("self"), "info", None)
            if other is not None and (other.uid, other.rank) == (info.uid, info.rank):
                return True
        frame = frame.f_back
    return False


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def aside(name: str, call: Callable[[], None]) -> None:
    """Call what takes locks: here, or on a thread of its own where this one may hold them already.

    Args:
        name: The thread's name.
        call: It must not raise.
    """
    if in_the_midst(2):
        Worker(name, call).start()
    else:
        call()
