"""Parts of the hot path in C, each with a counterpart in Python that means the same.

They need no torch to be built, only a C compiler when dist2 is installed. Where there was none, or with
``DIST2_COMPILED=0``, the counterparts run: slower, and otherwise no different. This is the one place that
looks for them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from dist2.config import environment_value

_OFF = ("0", "false", "no")


def _found(name: str) -> ModuleType | None:
    if (environment_value("DIST2_COMPILED") or "1").lower() in _OFF:
        return None
    try:
        return importlib.import_module(f"dist2.compiled.{name}")
    except ImportError:
        return None


steps = _found("_steps")
"""Runs the steps of programs on shared memory: see `dist2.backends.socket.flat`."""

records = _found("_records")
"""Makes, tells and counts the records of operations: see `dist2.operation`."""
