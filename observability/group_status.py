"""The groups of this process and their last failures: the content of `/groups` and `/healthz`."""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic_ns

import attrs

from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo

CLOSED_GROUPS = 64
"""Number of closed groups that are kept."""

FAILURES = 64
"""Number of failed operations that are kept."""

MESSAGE_CHARS = 2000
"""Longest error message that is kept, in characters."""


@attrs.frozen
class Failure:
    """A failed operation, in words: an exception would keep its frames and their tensors alive.

    Attributes:
        group: The group's name.
        op: Modern name of the operation.
        seq: Its number in the group.
        call: The call in a line, with the place in user code.
        error: Name of the exception's type.
        message: Its message.
        at_ns: Monotonic nanosecond of the end.
        group_usable: Whether later operations on the group can still succeed.
    """

    group: GroupInfo
    op: str
    seq: int
    call: str
    error: str
    message: str
    at_ns: int
    group_usable: bool

    @classmethod
    def of(cls, operation: Operation, error: BaseException) -> Failure:
        """Describe how an operation ended."""
        signature = operation.signature
        return cls(
            group=signature.group,
            op=signature.kind.value,
            seq=operation.seq,
            call=operation.describe(),
            error=type(error).__name__,
            message=str(error)[:MESSAGE_CHARS],
            at_ns=operation.finished_ns or monotonic_ns(),
            group_usable=bool(getattr(error, "group_usable", isinstance(error, Exception))),
        )


@attrs.define(eq=False)
class GroupStatus:
    """One group of this process.

    Attributes:
        info: Identity of the group.
        opened_ns: Monotonic nanosecond since which it is known.
        closed_ns: When it was shut down or aborted; 0 before.
        broken_by: The first failure after which it is unusable.
    """

    info: GroupInfo
    opened_ns: int
    closed_ns: int = 0
    broken_by: Failure | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was neither shut down nor aborted."""
        return not self.closed_ns

    @property
    def state(self) -> str:
        """``open``, ``broken`` (open, but unusable) or ``closed``."""
        if self.closed_ns:
            return "closed"
        return "broken" if self.broken_by is not None else "open"


class GroupStatusRegistry:
    """All open groups, the last closed groups and the last failures. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[GroupInfo, GroupStatus] = {}
        self._closed: deque[GroupStatus] = deque(maxlen=CLOSED_GROUPS)
        self._failures: deque[Failure] = deque(maxlen=FAILURES)

    def opened(self, info: GroupInfo) -> bool:
        """Add a group. Idempotent: True the first time."""
        with self._lock:
            if info in self._open:
                return False
            self._open[info] = GroupStatus(info, monotonic_ns())
            return True

    def taken_back(self, info: GroupInfo) -> GroupInfo | None:
        """Forget that a group was closed if it was only renamed; return its identity before."""
        with self._lock:
            for status in self._closed:
                if (status.info.uid, status.info.rank) == (info.uid, info.rank):
                    self._closed.remove(status)
                    return status.info
        return None

    def closed(self, info: GroupInfo) -> bool:
        """Note that a group was shut down or aborted. Idempotent: True the first time."""
        with self._lock:
            status = self._open.pop(info, None)
            if status is None:
                return False
            status.closed_ns = monotonic_ns()
            self._closed.append(status)
            return True

    def failed(self, failure: Failure) -> None:
        """Note a failed operation."""
        with self._lock:
            self._failures.append(failure)
            status = self._open.get(failure.group)
            if status is None:  # an abort closes the group before its operations end
                status = next((each for each in self._closed if each.info is failure.group), None)
            if status is not None and status.broken_by is None and not failure.group_usable:
                status.broken_by = failure

    def groups(self) -> list[GroupStatus]:
        """Return all known groups: open ones in the order they opened, then closed ones, newest first."""
        with self._lock:
            return [*self._open.values(), *reversed(self._closed)]

    def open_groups(self) -> list[GroupInfo]:
        """Return the open groups in the order they opened."""
        with self._lock:
            return list(self._open)

    def failures(self) -> list[Failure]:
        """Return the last failures, newest first."""
        with self._lock:
            return list(reversed(self._failures))
