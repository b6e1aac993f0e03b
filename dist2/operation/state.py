"""What a group may do, as plain values: read at every call.

`GroupState` is a type in C where that was built, and `PythonGroupState` elsewhere; they mean the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dist2.compiled import records
from dist2.errors import Dist2Error
from dist2.operation.coalescing import Batch


class PythonGroupState:
    """What a group's calls depend on, besides their arguments.

    Args:
        limit_ns: Limit of operations that name none, in nanoseconds.

    Attributes:
        fault: What makes the group refuse operations; None while it takes them.
        aborted: Whoever leaves the group last is to take down what it used.
        hooks: Called after every operation.
        batches: What a thread's operations are collected in, by its identity.
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
