"""Operations in the traces of `torch.profiler`: ``dist2:all_reduce`` beside the kernels of the model.

The instrument is there inside of `in_profiles` only: without a profiler nothing is paid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING

from torch.profiler import record_function

from dist2.operation.instruments import add_instrument
from dist2.operation.signature import Operation

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup


class ProfilerInstrument:
    """Opens a range when an operation begins, and closes it when the operation ends.

    The profiler nests the ranges of each thread. So an operation that ends in another thread than it began
    in, or after a later one, has none: an asynchronous message, say.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[Operation, record_function]]] = {}

    def group_opened(self, group: ProcessGroup) -> None:
        """Take no notice."""

    def group_closed(self, group: ProcessGroup) -> None:
        """Take no notice."""

    def operation_started(self, operation: Operation) -> None:
        """Open a range."""
        signature = operation.signature
        if signature.kind.is_p2p and operation.is_async:
            return
        described = f"{signature} #{operation.seq} group={signature.group.name}"
        opened = record_function(f"dist2:{signature.kind.value}", described)
        opened.__enter__()
        self._ranges.setdefault(get_ident(), []).append((operation, opened))

    def operation_finished(self, operation: Operation) -> None:
        """Close it."""
        ranges = self._ranges.get(get_ident())
        if ranges and ranges[-1][0] is operation:
            ranges.pop()[1].__exit__(None, None, None)

    def close(self) -> None:
        """Forget ranges that were never closed."""
        self._ranges.clear()


@contextmanager
def in_profiles() -> Iterator[None]:
    """Show operations to profilers that run inside of this block.

    Examples:
        >>> with observability.in_profiles():  # and torch.profiler.profile(): the profile has dist2:barrier
        ...     pg.barrier()
    """
    instrument = ProfilerInstrument()
    remove = add_instrument(instrument)
    try:
        yield
    finally:
        remove()
        instrument.close()
