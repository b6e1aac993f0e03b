# cython: annotation_typing=False
"""`CompletedWork`: the Work of an operation that was complete when its call returned.

Most Works are dropped by the statement that made the call, and making the C++ half of one takes longer than
the rest of a short call. So synchronous calls return this light object. For Python it is a `Work`:
``isinstance`` says so, and every attribute that it lacks is that of a `Work` made on demand. torch's C++
takes no Work without a half in C++: calls in c10d's form, by which it calls a group, return a `Work`
(`whole`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from dist2.operation.record import Operation
from dist2.operation.work import Work
from dist2.runtime.built import check_built

check_built(__name__, __file__)


class CompletedWork:
    """An operation that is complete."""

    operation: Operation
    outputs: Sequence[torch.Tensor]

    @property  # type: ignore[misc]  # the attribute can be set in other objects
    def __class__(self) -> Any:
        return Work

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_pybind11_"):  # C++ would get the half of a Work that is freed at once
            raise AttributeError(name)
        return getattr(whole(self), name)

    def __repr__(self) -> str:
        return repr(whole(self))

    def wait(self, timeout: object = None) -> bool:
        """Raise the operation's error, if it failed; return True."""
        if self.operation.error is not None:
            raise self.operation.error
        return True

    def __await__(self) -> Generator[Any, Any, list[torch.Tensor]]:
        """Return the output tensors to a task."""
        awaited: Generator[Any, Any, list[torch.Tensor]] = whole(self).__await__()
        return awaited

    def is_completed(self) -> bool:
        """Return True."""
        return True


def completed(operation: Operation, outputs: Sequence[torch.Tensor]) -> CompletedWork:
    """Return the Work of a complete operation."""
    work: CompletedWork = CompletedWork.__new__(CompletedWork)
    work.operation = operation
    work.outputs = outputs
    return work


def whole(work: Any) -> Any:
    """Return a Work that torch's C++ takes."""
    return Work(work.operation, work.outputs) if type(work) is CompletedWork else work
