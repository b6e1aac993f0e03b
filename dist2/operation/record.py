"""The record of one call, as plain values: the base of `dist2.operation.signature.Operation`.

`Record` is a type in C where that was built, and `PythonRecord` elsewhere; they mean the same.
"""

from __future__ import annotations

from sys import _getframe
from time import monotonic_ns
from types import CodeType
from typing import TYPE_CHECKING, Any, Self

from dist2.compiled import records

FIELDS = (
    "signature",
    "seq",
    "deadline_ns",
    "created_ns",
    "started_ns",
    "finished_ns",
    "error",
    "code",
    "instruction",
    "is_async",
    "source",
)
"""All there is in a record."""


class PythonRecord:
    """The fields of a record; `dist2.operation.signature.Operation` documents them."""

    __slots__ = (*FIELDS, "__weakref__")

    def __init__(self, signature: Any, seq: int, created_ns: int, deadline_ns: int, is_async: bool) -> None:
        self.signature = signature
        self.seq = seq
        self.created_ns = created_ns
        self.deadline_ns = deadline_ns
        self.is_async = is_async
        self.started_ns = 0
        self.finished_ns = 0
        self.error: BaseException | None = None
        self.code: CodeType | None = None
        self.instruction = 0
        self.source = -1

    @classmethod
    def begun(cls, signature: Any, limit_ns: int, is_async: bool, here: str | tuple[str, ...]) -> Self:
        """Return the record of a call that begins now.

        Args:
            signature: Signature of the call.
            limit_ns: Its timeout, in nanoseconds.
            is_async: Whether the caller asked for a Work to wait on.
            here: Directories of the library. Frames of files whose names begin with one of these are skipped
                to find the user's call site; if all are skipped, it is the outermost frame.
        """
        created_ns = monotonic_ns()
        record = cls(signature, 0, created_ns, created_ns + limit_ns, is_async)
        frame = _getframe(1)
        while frame.f_code.co_filename.startswith(here) and frame.f_back is not None:
            frame = frame.f_back
        record.code = frame.f_code
        record.instruction = frame.f_lasti
        return record


if TYPE_CHECKING:
    Record = PythonRecord
else:
    Record = PythonRecord if records is None else records.Record
