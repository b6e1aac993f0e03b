"""An instrument that records its calls, and a backend with the behaviour that a test sets."""

from __future__ import annotations

from typing import Any

from dist2 import ProcessGroup
from dist2.operation.record import Operation, State


class Told:
    """An instrument that records its calls.

    Attributes:
        events: Kind of event, state and operation of each call.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, State, int]] = []

    def group_opened(self, group: Any) -> None: ...
    def group_closed(self, group: Any) -> None: ...

    def operation_started(self, operation: Operation) -> None:
        self.note("started", operation)

    def operation_finished(self, operation: Operation) -> None:
        self.note("finished", operation)

    def note(self, event: str, operation: Operation) -> None:
        """Keep an event: for hooks as well."""
        self.events.append((event, operation.state, operation.seq))


def backend_does(pg: ProcessGroup, call: Any) -> None:
    """Have the group's backend call ``call(operation)`` in every operation."""

    def execute(operation: Operation, inputs: Any, outputs: Any) -> Any:
        return call(operation)

    pg.backend.plan = pg.backend.plan_plain = lambda signature: execute  # type: ignore[method-assign]  # in place of the method
