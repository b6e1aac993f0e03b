"""The parts of operations: when they copied, waited for others, sent, received and reduced.

They are recorded on request, for some seconds. At other times no clock is read: a script in C looks at one
pointer, a program of messages at one attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import NamedTuple
from weakref import WeakKeyDictionary

from dist2.operation.engine import take_parts
from dist2.operation.record import Operation
from dist2.runtime.deadline import deadline_in

MOST_PARTS = 256
"""Parts that are kept of one operation."""


class Part(NamedTuple):
    """What an operation did for a while.

    Attributes:
        name: ``copy``, ``wait``, ``reduce``, ``send``, ``recv``; or ``other``: between those, in Python.
        begun_ns: Monotonic nanosecond of its begin,
        ended_ns: and of its end.
    """

    name: str
    begun_ns: int
    ended_ns: int


class PartsLog:
    """The parts of the operations that are still remembered by somebody.

    Attributes:
        on: Whether parts are recorded.
    """

    def __init__(self) -> None:
        self.on = False
        self._until_ns = 0
        self._parts: WeakKeyDictionary[Operation, list[Part]] = WeakKeyDictionary()

    def record(self, seconds: float) -> None:
        """Record the parts of all operations of this process that begin in the next seconds."""
        self._until_ns = deadline_in(seconds)
        self.on = True
        take_parts(self.take)

    def take(self, operation: Operation, begun_ns: int, parts: Iterable[tuple[str, int, int]]) -> None:
        """Add parts to those of an operation; a last one without a length has lasted until these begin.

        Args:
            operation: The operation.
            begun_ns: When they began to be recorded.
            parts: Name, begin and end of each.
        """
        known = self._parts.setdefault(operation, [])
        if known and begun_ns > known[-1].ended_ns:
            last = known[-1]
            if last.begun_ns == last.ended_ns:
                known[-1] = Part(last.name, last.begun_ns, begun_ns)
            else:
                known.append(Part("other", last.ended_ns, begun_ns))
        known += [Part(*each) for each in parts]
        del known[MOST_PARTS:]
        if monotonic_ns() > self._until_ns:
            self.stop()

    def stop(self) -> None:
        """Record no more; what was recorded stays as long as its operations do."""
        self.on = False
        take_parts(None)

    def of(self, operation: Operation) -> Sequence[Part]:
        """Return the parts of an operation, in their order."""
        return tuple(self._parts.get(operation, ()))


parts_log = PartsLog()
"""That of this process."""


class PartsClock:
    """Takes the parts of one operation that Python runs.

    Args:
        operation: The operation.
        waited_ns: Returns for how long its group has waited for others.
    """

    def __init__(self, operation: Operation, waited_ns: Callable[[], int]) -> None:
        self._operation = operation
        self._waited_ns = waited_ns
        self._last_ns, self._before_ns = monotonic_ns(), waited_ns()

    def note(self, name: str) -> None:
        """Note what was done since the last note, except for the time spent waiting."""
        now_ns, waited_ns = monotonic_ns(), self._waited_ns()
        moved_ns = now_ns - min(waited_ns - self._before_ns, now_ns - self._last_ns)
        both = (name, self._last_ns, moved_ns), ("wait", moved_ns, now_ns)
        parts_log.take(self._operation, self._last_ns, [each for each in both if each[2] > each[1]])
        self._last_ns, self._before_ns = now_ns, waited_ns
