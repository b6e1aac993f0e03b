"""Logs with rank, group, operation and sequence number bound: for people at a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import structlog
from structlog.typing import FilteringBoundLogger

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.deadline import seconds
from observability.flight_recorder import global_rank

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup

LEVELS = ("debug", "info", "warning", "error", "critical")


def configure_logs(json: bool | None = None, *, level: str = "info") -> None:
    """Have dist2 and structlog log to standard error: one event a line, with the fields of `log_context`.

    dist2 itself configures nothing, and logs by the standard library's `logging`, to loggers below ``dist2``.
    This gives that logger a handler that renders records by structlog, fields included, and sets structlog's
    own configuration to the same form.

    Args:
        json: One JSON object a line. By default where standard error is no terminal.
        level: The least that is written.

    Raises:
        InvalidUsageError: The level is none of ``debug, info, warning, error, critical``.

    Examples:
        >>> observability.configure_logs(level="warning")
    """
    if level not in LEVELS:
        raise InvalidUsageError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    if json is None:
        json = not sys.stderr.isatty()
    collecting: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*collecting, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*collecting, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )
    handler = _Handler(sys.stderr)
    handler.setFormatter(formatter)
    ours = logging.getLogger("dist2")
    for earlier in [each for each in ours.handlers if isinstance(each, _Handler)]:
        ours.removeHandler(earlier)
    ours.addHandler(handler)
    ours.setLevel(number)
    ours.propagate = False  # else a program's own handlers would write each line again


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `configure_logs` replaces when it is called again."""


def fields_of(about: GroupInfo | Operation) -> dict[str, str | int]:
    """Return the fields of a log line about a group, or an operation on it."""
    if isinstance(about, GroupInfo):
        fields: dict[str, str | int] = {
            "rank": global_rank(about),
            "world_size": about.world_size,
            "group": about.name,
        }
        return fields if about.rank == fields["rank"] else {**fields, "group_rank": about.rank}
    if not isinstance(about, Operation):
        raise ArgumentTypeError(
            f"about must be the info of a group (pg.info) or an operation, "
            f"got {about!r} ({type(about).__name__})"
        )
    signature = about.signature
    return {**fields_of(signature.group), "op": signature.kind.value, "seq": about.seq}


@contextmanager
def log_context(about: GroupInfo | Operation, **more: object) -> Iterator[None]:
    """Bind rank, group and, for an operation, op and seq to all that this thread or task logs inside.

    Args:
        about: ``pg.info``, or an operation.
        more: Further fields, such as ``step=12``.

    Raises:
        ArgumentTypeError: ``about`` is neither: a group itself, say.

    Examples:
        >>> with observability.log_context(pg.info, step=12):
        ...     print(structlog.contextvars.get_contextvars()["step"])
        12
    """
    with structlog.contextvars.bound_contextvars(**fields_of(about), **more):
        yield


def bind_operation(logger: FilteringBoundLogger, operation: Operation) -> FilteringBoundLogger:
    """Return the logger with rank, group, op and seq bound.

    Args:
        logger: A logger of structlog.
        operation: The operation, such as ``work.operation``.

    Examples:
        >>> work = pg.barrier()
        >>> log = observability.bind_operation(structlog.get_logger(), work.operation)
    """
    bound: FilteringBoundLogger = logger.bind(**fields_of(operation))
    return bound


class LogInstrument:
    """An instrument that logs failed operations, and slow ones: give it to `dist2.add_instrument`.

    Args:
        slow_s: Operations that take longer than this are logged as warnings; none by default.

    Examples:
        >>> remove = dist2.add_instrument(observability.LogInstrument(slow_s=5))
        >>> remove()
    """

    def __init__(self, slow_s: float | None = None) -> None:
        self._slow_ns = float("inf") if slow_s is None else seconds(slow_s, "slow_s") * 1e9
        self._log = logging.getLogger("dist2.operations")

    def group_opened(self, group: ProcessGroup) -> None:
        """Log a new group."""
        info = group.info
        fields = {**fields_of(info), "backend": info.backend, "desc": info.desc}
        self._log.info("opened group %s over %s", info.name, info.backend, extra=fields)

    def group_closed(self, group: ProcessGroup) -> None:
        """Log its end."""
        self._log.info("closed group %s", group.info.name, extra=fields_of(group.info))

    def operation_started(self, operation: Operation) -> None:
        """Do nothing: a line for each operation would be too many."""

    def operation_finished(self, operation: Operation) -> None:
        """Log it, where it failed or took long."""
        elapsed_ns = operation.finished_ns - operation.created_ns
        if operation.error is None and elapsed_ns <= self._slow_ns:
            return
        call, elapsed_s, error = operation.describe(), elapsed_ns / 1e9, operation.error
        fields = {**fields_of(operation), "call": call, "elapsed_s": elapsed_s}
        if error is None:
            fields["slow_s"] = self._slow_ns / 1e9
            self._log.warning("%s took %.3g s", call, elapsed_s, extra=fields)
        else:
            fields |= {"error": type(error).__name__, "reason": str(error)}
            self._log.error("%s failed: %s: %s", call, type(error).__name__, error, extra=fields)
