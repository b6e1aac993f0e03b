"""`fast_method`: methods in C for calls as they are mostly spelled.

A call with positional arguments alone, of plain tensors, whose plan is known runs in C from its caller to the
group's `OperationRunner`. The peer of a message may be spelled ``dst=`` or ``src=``, or be followed by a tag.
All other calls, and all calls where the parts in C were not built, take the method in Python, which means the
same.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from dist2.compiled import records
from dist2.operation.kinds import OpKind
from dist2.operation.work import Work

_Method = TypeVar("_Method", bound=Callable[..., Work])


class Pattern(enum.IntEnum):
    """The meaning of a method's positional arguments; ``fast_methods.c`` has the same values."""

    NOTHING = 0
    """None."""
    IN_PLACE = 1
    """A tensor, read and written."""
    FROM_ROOT = 2
    """The same, and a root, on which ranks must agree."""
    TO_ROOT = 3
    """A tensor, written at the root alone, and a root, on which ranks agree besides."""
    OUT_AND_IN = 4
    """An output and an input."""
    LIST_AT_ROOT = 5
    """Outputs, an input, and a root, on which ranks agree."""
    LIST_OF_ROOT = 6
    """An output, inputs, and a root, on which ranks agree."""
    TO_PEER = 7
    """A tensor that is read, and a rank."""
    FROM_PEER = 8
    """A tensor that is written, and a rank."""


def fast_method(
    method: _Method, pattern: Pattern, kind: OpKind, agreed: Any = None, async_op: bool = False
) -> _Method:
    """Return a method that runs common calls in C and passes the others to a method in Python.

    Args:
        method: Takes every call.
        pattern: The usual spelling of its calls.
        kind: Which operation they are.
        agreed: Default of the arguments on which ranks must agree: the key by which plans are found.
        async_op: Whether its calls are asynchronous.
    """
    if records is None:
        return method
    return functools.update_wrapper(  # type: ignore[return-value]  # called as the method is
        records.FastMethod(method, int(pattern), kind, agreed, async_op), method
    )
