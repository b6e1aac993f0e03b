"""The state of a group that every call reads, as plain values.

`GroupState` is a type in C where that was built, and `PythonGroupState` elsewhere; they mean the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dist2.compiled import records
from dist2.errors import Dist2Error
from dist2.operation.coalescing import Batch


class PythonGroupState:
    """State on which a group's calls depend, besides their arguments.

    Args:
        limit_ns: Limit of operations that name none, in nanoseconds.

    Attributes:
        fault: The error with which the group refuses operations; None while it accepts them.
        aborted: The last thread to leave the group must release its resources.
        hooks: Called after every operation.
        batches: The batch that collects a thread's operations, by thread id.
    """

    __slots__ = ("aborted", "batches", "fault", "hooks", "limit_ns")

    def __init__(self, limit_ns: int) -> None:
        self.limit_ns = limit_ns
        self.fault: Dist2Error | None = None
        self.aborted = False
        self.hooks: tuple[Callable[[Any], None], ...] = ()
        self.batches: dict[int, Batch] = {}


if TYPE_CHECKING:
    GroupState = PythonGroupState
else:
    GroupState = PythonGroupState if records is None else records.GroupState
