# cython: annotation_typing=False
"""Registration of instruments: they observe groups and operations, and cannot break them.

Nothing in dist2 imports an instrument. Those that every process wants (flight recorder, counters) are
entry points of the group ``dist2.instruments``, loaded with the first process group; others call
`add_instrument`. An instrument that raises is dropped and logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from dist2.errors import InvalidUsageError
from dist2.operation.profiling import NAMES, RUNS, ProfilerRanges
from dist2.operation.record import Listener, Operation
from dist2.runtime.built import check_built
from dist2.runtime.config import environment_flag

Tell = Callable[[Operation], object]

ENTRY_POINT_GROUP = "dist2.instruments"

check_built(__name__, __file__)

log = logging.getLogger("dist2.operation.instruments")


class Instrument(Protocol):
    """The methods of an instrument. Called inline on hot paths, where a microsecond matters."""

    def group_opened(self, group: Any) -> None:
        """A group of this process is ready for operations."""

    def group_closed(self, group: Any) -> None:
        """The group was shut down or aborted; called once."""

    def operation_started(self, operation: Operation) -> None:
        """An operation was numbered and is about to be handed to the backend."""

    def operation_finished(self, operation: Operation) -> None:
        """It ended: `operation.error` tells how."""


_EVENTS = ("group_opened", "group_closed", "operation_started", "operation_finished")


class Calling(Listener):
    """The listener of an instrument's method in Python.

    Args:
        method: The method.
    """

    def __init__(self, method: Tell) -> None:
        self._method = method

    def hear(self, operation: Operation) -> int:
        """Call the method with an operation."""
        self._method(operation)
        return 0


class Dispatch:
    """The instruments of this process, flattened to one tuple of listeners an event.

    Attributes:
        profiler: Names in torch's profiler; `RUNS` tells whether it runs.
    """

    profiler: dict[str, Any]

    def __init__(self) -> None:
        self.profiler = NAMES
        self._ranges = ProfilerRanges(self.add)
        self.instruments: tuple[Instrument, ...] = ()
        self.operation_started: tuple[Listener, ...] = ()
        self.operation_finished: tuple[Listener, ...] = ()
        self._lock = threading.Lock()
        self._loaded = False
        self.on_raise: Callable[[Listener, Exception], None] = self.raised

    def add(self, instrument: Instrument) -> Callable[[], None]:
        """Register an instrument; return a callable that removes it again.

        Raises:
            InvalidUsageError: It is not an instrument.
        """
        missing = [event for event in _EVENTS if not callable(getattr(instrument, event, None))]
        if missing:
            raise InvalidUsageError(
                f"instrument must have the methods of dist2.operation.instruments.Instrument, "
                f"got {instrument!r} ({type(instrument).__name__}) without {', '.join(missing)}"
            )
        with self._lock:
            self._set((*self.instruments, instrument))

        def remove() -> None:
            with self._lock:
                self._set(tuple(each for each in self.instruments if each is not instrument))

        return remove

    def load_defaults(self) -> None:
        """Load the instruments that installed packages name as entry points, once a process."""
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
        for point in _installed():
            try:
                self.add(point.load())
            except (ImportError, InvalidUsageError) as error:
                log.warning("instrument %s cannot be loaded: %s", point.name, error)

    def drop(self, instrument: Instrument, error: BaseException) -> None:
        """Remove an instrument that raised, and say so."""
        with self._lock:
            self._set(tuple(each for each in self.instruments if each is not instrument))
        log.error("instrument %s raised, and is switched off: %r", type(instrument).__name__, error)

    def group_opened(self, group: Any) -> None:
        for instrument in self.instruments:
            try:
                instrument.group_opened(group)
            except Exception as error:  # noqa: BLE001 - an instrument must never break a group
                self.drop(instrument, error)

    def group_closed(self, group: Any) -> None:
        for instrument in self.instruments:
            try:
                instrument.group_closed(group)
            except Exception as error:  # noqa: BLE001 - an instrument must never break a group
                self.drop(instrument, error)

    def _set(self, instruments: tuple[Instrument, ...]) -> None:
        self.instruments = instruments
        self.operation_started = tuple([_listener(each.operation_started) for each in instruments])
        self.operation_finished = tuple([_listener(each.operation_finished) for each in instruments])

    def notice(self, operation: Operation) -> None:
        """Show an operation that was called or begins to torch's profiler, if that runs."""
        if self.profiler.get(RUNS):
            self.profiled(operation)

    def profiled(self, operation: Operation) -> None:
        """Open a range in the profile that is made."""
        try:
            self._ranges.open(operation)
        except Exception as error:  # noqa: BLE001 - a profile must never break a collective
            self._ranges.failed = True
            self.drop(self._ranges, error)

    def started(self, operation: Operation) -> None:
        """Tell every instrument that an operation begins."""
        self.notice(operation)
        tell(self.operation_started, operation, self.on_raise)

    def finished(self, operation: Operation) -> None:
        """Tell every instrument that an operation ended."""
        tell(self.operation_finished, operation, self.on_raise)

    def raised(self, listener: Listener, error: Exception) -> None:
        """Remove the instrument whose method raised."""
        with self._lock:
            methods = zip(self.instruments, self.operation_started, self.operation_finished, strict=True)
            raised = [each for each, *heard in methods if any(one is listener for one in heard)]
        for instrument in raised:
            self.drop(instrument, error)


def _listener(method: Tell) -> Listener:
    """Return the listener of an instrument's method: many are one."""
    return method if isinstance(method, Listener) else Calling(method)


def tell(
    listeners: tuple[Listener, ...], operation: Operation, failed: Callable[[Listener, Exception], None]
) -> int:
    """Have each of ``listeners`` hear of an operation.

    Args:
        listeners: In order.
        operation: What they hear of.
        failed: Called with a listener that raised, and its exception, if that is an `Exception`; the others
            still hear of it.

    Returns:
        0.

    Raises:
        BaseException: Any that is no `Exception`, and exceptions of ``failed``.
    """
    at = 0
    while at < len(listeners):
        try:
            while at < len(listeners):
                listener = listeners[at]
                listener.hear(operation)
                at += 1
        except Exception as error:  # noqa: BLE001 - its instrument is dropped
            failed(listeners[at], error)
            at += 1
    return 0


dispatch = Dispatch()
"""The one dispatcher of the process."""


def add_instrument(instrument: Instrument) -> Callable[[], None]:
    """Let an instrument see every operation of this process; the returned callable removes it.

    Args:
        instrument: Has the four methods of the example.

    Raises:
        InvalidUsageError: It lacks a method that instruments have.

    Examples:
        >>> class Slow:
        ...     def operation_finished(self, operation):
        ...         if operation.finished_ns - operation.created_ns > 1_000_000_000:
        ...             print(operation.describe())
        ...     def operation_started(self, operation): ...
        ...     def group_opened(self, group): ...
        ...     def group_closed(self, group): ...
        >>> remove = dist2.add_instrument(Slow())
        >>> pg.barrier()
        >>> remove()
    """
    return dispatch.add(instrument)


@cache
def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def preload() -> None:
    """Import the default instruments without adding them. `Dispatch.load_defaults` reports failures."""
    with suppress(InvalidUsageError):
        if environment_flag("DIST2_INSTRUMENTS", True):
            for point in _installed():
                with suppress(ImportError, InvalidUsageError):
                    point.load()
