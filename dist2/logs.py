"""What dist2 logs: to structlog where the program has configured it, else to the standard library's logging.

Nothing is configured here, and nothing goes to standard output, which is the program's. Where the program has
configured neither, what Python does by default holds: warnings and worse go to standard error.
"""

from __future__ import annotations

import logging

import structlog


class Logger:
    """Where one part of dist2 logs what happens: events, each with a name and fields.

    Args:
        name: The part's name, such as ``dist2.store``.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, event: str, **fields: object) -> None:
        """Log what is as it should be."""
        self._log("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log what somebody may want to look into."""
        self._log("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log what has failed."""
        self._log("error", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log what has failed, with the exception that is being handled."""
        self._log("exception", event, fields)

    def _log(self, method: str, event: str, fields: dict[str, object]) -> None:
        if structlog.is_configured():  # asked each time: programs configure it after they import
            getattr(structlog.get_logger(self._name), method)(event, **fields)
            return
        fields = {**structlog.contextvars.get_contextvars(), **fields}
        text = " ".join([event, *(f"{name}={value!r}" for name, value in fields.items())])
        getattr(logging.getLogger(self._name), method)(text, stacklevel=3)
