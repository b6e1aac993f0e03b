"""Logs with rank, group, operation and sequence number bound: for people at a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import FilteringBoundLogger

from dist2.clock import seconds
from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.logs import Logger
from dist2.operation import GroupInfo, Operation

if TYPE_CHECKING:
    from dist2.group import ProcessGroup

LEVELS = ("debug", "info", "warning", "error", "critical")


def configure_logs(json: bool | None = None, *, level: str = "info") -> None:
    """Have structlog write to standard error: one event a line, with what `log_context` bound.

    It sets structlog's configuration for the whole process; dist2 itself never does: see `dist2.logs`.

    Args:
        json: One JSON object a line. By default where standard error is no terminal.
        level: The least that is written.

    Raises:
        InvalidUsageError: The level is none of ``debug, info, warning, error, critical``.
    """
    if level not in LEVELS:
        raise InvalidUsageError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    if json is None:
        json = not sys.stderr.isatty()
    rendering: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def fields_of(about: GroupInfo | Operation) -> dict[str, str | int]:
    """Return what a log line about a group, or an operation on it, should bear."""
    if isinstance(about, GroupInfo):
        return {"rank": about.rank, "world_size": about.world_size, "group": about.name}
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
    """
    with structlog.contextvars.bound_contextvars(**fields_of(about), **more):
        yield


def bind_operation(logger: FilteringBoundLogger, operation: Operation) -> FilteringBoundLogger:
    """Return the logger with rank, group, op and seq bound."""
    bound: FilteringBoundLogger = logger.bind(**fields_of(operation))
    return bound


class LogInstrument:
    """An instrument that logs failed operations, and slow ones: give it to `dist2.hooks.add_instrument`.

    Args:
        slow_s: Operations that take longer than this are logged as warnings; none by default.
    """

    def __init__(self, slow_s: float | None = None) -> None:
        self._slow_ns = float("inf") if slow_s is None else seconds(slow_s, "slow_s") * 1e9
        self._log = Logger("dist2.operations")

    def group_opened(self, group: ProcessGroup) -> None:
        """Log a new group."""
        info = group.info
        self._log.info("group_opened", **fields_of(info), backend=info.backend, desc=info.desc)

    def group_closed(self, group: ProcessGroup) -> None:
        """Log its end."""
        self._log.info("group_closed", **fields_of(group.info))

    def operation_started(self, operation: Operation) -> None:
        """Do nothing: a line for each operation would help nobody."""

    def operation_finished(self, operation: Operation) -> None:
        """Log it, where it failed or took long."""
        elapsed_ns = operation.finished_ns - operation.created_ns
        if operation.error is None and elapsed_ns <= self._slow_ns:
            return
        facts = {**fields_of(operation), "call": operation.describe(), "elapsed_s": elapsed_ns / 1e9}
        error = operation.error
        if error is None:
            self._log.warning("operation_slow", **facts, slow_s=self._slow_ns / 1e9)
        else:
            self._log.error("operation_failed", **facts, error=type(error).__name__, reason=str(error))
