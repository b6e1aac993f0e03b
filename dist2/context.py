"""The current group of each thread: a stack that `process_group` pushes to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist2.group import ProcessGroup


class _Stack(threading.local):
    def __init__(self) -> None:
        self.groups: list[ProcessGroup] = []


_stack = _Stack()


def current_process_group() -> ProcessGroup | None:
    """Return the innermost group that this thread is inside of, or None."""
    return _stack.groups[-1] if _stack.groups else None


@contextmanager
def process_group(pg: ProcessGroup) -> Iterator[ProcessGroup]:
    """Make ``pg`` this thread's current group for the length of a ``with`` block.

    Blocks nest, and other threads are not affected. Inside, `dist2.legacy` calls without ``group=`` act
    on ``pg``. An exception leaves the block as any other end does: the group before is back.

    Args:
        pg: The group; it stays open when the block ends.
    """
    _stack.groups.append(pg)
    try:
        yield pg
    finally:
        _stack.groups.pop()
