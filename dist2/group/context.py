"""The current group of each thread and asyncio task: a stack that `process_group` pushes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.distributed import ProcessGroup as TorchProcessGroup

from dist2.errors import GroupAbortedError, InvalidUsageError
from dist2.group.process_group import ProcessGroup

# Of a context rather than of a thread: the tasks of an event loop take turns in one thread.
_entered: ContextVar[tuple[ProcessGroup, ...]] = ContextVar("dist2_entered", default=())


def current_process_group() -> ProcessGroup | None:
    """Return the innermost group that this thread or asyncio task is inside of, or None.

    Examples:
        >>> with dist2.process_group(pg):
        ...     print(dist2.current_process_group() is pg)
        True
    """
    groups = _entered.get()
    return groups[-1] if groups else None


@contextmanager
def process_group(pg: ProcessGroup) -> Iterator[ProcessGroup]:
    """Make ``pg`` the current group of this thread for the length of a ``with`` block.

    Blocks nest, and other threads are not affected; nor are other asyncio tasks, but those that are made
    inside. Inside, `dist2.legacy` calls without ``group=`` act on ``pg``. An exception leaves the block as
    any other end does: the group before is back. A block in a generator lasts until the generator leaves it.

    Args:
        pg: The group; it stays open when the block ends.

    Raises:
        InvalidUsageError: ``pg`` is not a process group of dist2's: `split` returns None on ranks that are
            left out.
        GroupAbortedError: ``pg`` is closed; where something else broke it before, that error. A group that
            is broken and not closed is entered: `shrink` and `agree` work on it.

    Examples:
        >>> with dist2.process_group(pg):
        ...     dist2.current_process_group().barrier()
    """
    check_open_group(pg, "the current group")
    if not isinstance(pg, ProcessGroup):
        raise InvalidUsageError(
            f"pg must be a group of dist2's, got {type(pg).__module__}.{type(pg).__qualname__}: make it with "
            f"dist2.new_group; for a backend of another package, register its factory with "
            f"dist2.register_backend"
        )
    _entered.set((*_entered.get(), pg))
    try:
        yield pg
    finally:
        _leave(pg)


def check_open_group(pg: object, part: str) -> None:
    """Refuse an object that cannot serve as a group, before the first operation fails on it.

    Args:
        pg: The group.
        part: The intended role, for errors: ``"the current group"``.

    Raises:
        InvalidUsageError: It is not a process group.
        GroupAbortedError: It is closed; the error that broke it, if it was broken before.
    """
    if not isinstance(pg, TorchProcessGroup):
        raise InvalidUsageError(f"pg must be a process group, got {pg!r} ({type(pg).__name__})")
    if isinstance(pg, ProcessGroup) and pg.is_closed:  # torch's own groups have no such state
        name = pg.group_name
        why = pg._runner.fault or GroupAbortedError(f"group {name!r} is closed", group=name, rank=pg.rank())
        raise why.again(f"pg is closed and cannot be {part}: {why}")


def _leave(pg: ProcessGroup) -> None:
    """Take out the innermost entry of a group, which is not the last one where blocks end out of order."""
    groups = _entered.get()
    for place in reversed(range(len(groups))):
        if groups[place] is pg:
            _entered.set(groups[:place] + groups[place + 1 :])
            return
