"""The log records of dist2 during a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Keeping(logging.Handler):
    def __init__(self, kept: list[dict[str, Any]]) -> None:
        super().__init__()
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append({**vars(record), "event": record.getMessage()})


@contextmanager
def logged() -> Iterator[list[dict[str, Any]]]:
    """Yield the attributes of the records that dist2 logs inside of a `with` block, the text as ``event``."""
    ours, kept = logging.getLogger("dist2"), list[dict[str, Any]]()
    handler, level = _Keeping(kept), ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    try:
        yield kept
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


def refusals_in(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of refused connections."""
    return [each for each in records if each["event"].startswith("refused a ")]
