# cython: annotation_typing=False
"""`Operation`: the record of one call; `Listener`: what instruments in Cython derive from.

Compiled by Cython, as all modules beside a ``.pxd`` are. No code in Python runs within a function of such a
module unless it is called, so what only sets fields is one atomic step for other threads.
"""

from __future__ import annotations

import enum
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import cython
from cython.cimports.dist2.operation.interpreter import (
    code_of_frame,
    frame_before,
    innermost_frame,
    instruction_of_frame,
    monotonic_ns,
    place_of,
)

from dist2.operation.description import Call
from dist2.runtime.built import check_built

if TYPE_CHECKING:
    from dist2.operation.signature import Signature

check_built(__name__, __file__)

KEPT = 64

known_codes: list[CodeType | None] = [None] * KEPT
"""Code that called lately, each at a place that follows from its address,"""
known_inside: list[bool] = [False] * KEPT
"""whether its file is in one of the directories of the library,"""
known_here: tuple[str, ...] | None = None
"""which are these."""


class State(enum.Enum):
    """The state of an operation."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"


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


class Operation:
    """The record of one call, which instruments see and the flight recorder keeps.

    It holds no tensors. Written by the thread that runs the operation, read by any.

    Attributes:
        signature: Signature of the call.
        seq: Number of this collective in its group, or of this point-to-point in its group; from 1.
        deadline_ns: Monotonic nanosecond after which it times out.
        created_ns: Monotonic nanosecond of the call.
        started_ns: When it began to move data; 0 before.
        finished_ns: When it ended, well or badly; 0 before.
        error: The exception that it failed with, or None.
        code: Code object of the frame in user code that called, and
        instruction: the offset in it (the line costs more to compute than an operation may).
        is_async: Whether the caller asked for a Work to wait on.
        source: Group rank that a receive got its message from; -1 before, and elsewhere.
    """

    signature: Signature
    seq: int
    deadline_ns: int
    created_ns: int
    started_ns: int
    finished_ns: int
    error: BaseException | None
    code: CodeType | None
    instruction: int
    source: int
    _places: Any

    def __init__(self, signature: Any, seq: int, created_ns: int, deadline_ns: int, is_async: bool) -> None:
        self.signature = signature
        self.seq = seq
        self.created_ns = created_ns
        self.deadline_ns = deadline_ns
        self._is_async = is_async
        self.source = -1

    @staticmethod
    def begun(signature: Any, limit_ns: int, is_async: bool, here: tuple[str, ...]) -> Operation:
        """Return the record of a call that begins now.

        Args:
            signature: Signature of the call.
            limit_ns: Its timeout, in nanoseconds.
            is_async: Whether the caller asked for a Work to wait on.
            here: Directories of the library. Frames of files whose names begin with one of these are skipped
                to find the user's call site; if all are skipped, it is the outermost frame.
        """
        return begin(signature, monotonic_ns(), limit_ns, is_async, here)

    def note_caller(self, here: tuple[str, ...]) -> int:
        """Find the innermost frame of the user's code, and note it. Mostly the same code calls again."""
        global known_here
        if here is not known_here:
            known_codes[:] = [None] * KEPT
            known_here = here
        frame: FrameType | None = innermost_frame()
        while frame is not None:
            code = code_of_frame(frame)
            at = place_of(code, KEPT)
            if code is not known_codes[at]:
                known_codes[at], known_inside[at] = code, code.co_filename.startswith(here)
            outer: FrameType | None = frame_before(frame) if known_inside[at] else None
            if outer is None:
                self.code = code
                self.instruction = instruction_of_frame(frame)
                break
            frame = outer
        return 0

    @property
    def is_async(self) -> bool:
        return bool(self._is_async)

    @is_async.setter
    def is_async(self, is_async: bool) -> None:
        self._is_async = is_async

    @property
    def has_places(self) -> bool:
        """Whether the call is under way with known addresses of its tensors."""
        return bool(self._places != cython.NULL)

    @property
    def state(self) -> State:
        """The state, derived from the times."""
        if self.finished_ns:
            return State.COMPLETED if self.error is None else State.FAILED
        return State.STARTED if self.started_ns else State.SCHEDULED

    @property
    def timeout_s(self) -> float:
        """The limit it was given, in seconds."""
        return (self.deadline_ns - self.created_ns) / 1e9

    @property
    def line(self) -> int:
        """Line of the call in `code`; 0 where unknown."""
        if self.code is None:
            return 0
        for start, end, line in self.code.co_lines():
            if start <= self.instruction < end:
                return line or 0
        return 0

    def call(self) -> Call:
        """Return the description of the call that other ranks get."""
        signature = self.signature
        metas = signature.compared
        return Call(
            op=signature.kind.value,
            seq=self.seq,
            dtypes=tuple([str(meta.dtype).removeprefix("torch.") for meta in metas]),
            shapes=tuple([meta.shape for meta in metas]),
            reduction=None if signature.reduction is None else str(signature.reduction),
            root=signature.root,
            peer=signature.peer,
            tag=signature.tag if signature.kind.is_p2p else None,
            file=self.code.co_filename if self.code is not None else "",
            line=self.line,
            text=self.describe(),
        )

    def describe(self) -> str:
        """Describe the call and its place in a line: ``all_reduce(float32[4], op=sum) #7 at train.py:12``."""
        where = f" at {self.code.co_filename}:{self.line}" if self.code is not None else ""
        return f"{self.signature} #{self.seq}{where}"

    def __repr__(self) -> str:
        return f"<Operation {self.describe()}, {self.state.value}>"


class Listener:
    """A callable of an instrument that the runner calls without the detour of a Python call."""

    def hear(self, operation: Operation) -> int:
        """Take in an operation; return 0."""
        raise NotImplementedError

    def __call__(self, operation: Operation) -> None:
        self.hear(operation)


def begin(
    signature: Any, created_ns: int, limit_ns: int, is_async: bool, here: tuple[str, ...] | None
) -> Operation:
    """Return the record of a call; if ``here`` is None, its caller is not looked for."""
    self: Operation = Operation.__new__(Operation)
    self.signature = signature
    self.created_ns = created_ns
    self.deadline_ns = created_ns + limit_ns
    self._is_async = is_async
    self.source = -1
    if here is not None:
        self.note_caller(here)
    return self
