"""Parts of the hot path in C, each with a counterpart in Python that means the same.

They need no torch to be built, only a C compiler when dist2 is installed. Where there was none, or with
``DIST2_COMPILED=0``, the counterparts run: slower, and otherwise no different. This is the one place that
looks for them.
"""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from types import ModuleType

from dist2.runtime.config import environment_flag

_SOURCE = Path(__file__).with_name("source")
_outdated: list[str] = []
"""The parts that are there and not used, as their source is newer: `remedy` names them."""


def _found(name: str) -> ModuleType | None:
    if not environment_flag("DIST2_COMPILED", True):
        return None
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ImportError:
        return None
    if any(_is_outdated(module, source) for source in _sources_of(name, _SOURCE)):
        _outdated.append(name)
        return None
    return module


def _sources_of(name: str, folder: Path) -> list[Path]:
    """Return what a part is built from: its own folder and the headers that all share; nothing in a wheel."""
    return [*folder.glob("*.h"), *folder.joinpath(name.strip("_")).glob("*.[ch]")]


def _is_outdated(module: ModuleType, source: Path) -> bool:
    """Whether a source that was edited or updated in place has not been built since."""
    built = Path(str(module.__file__))
    return source.stat().st_mtime > built.stat().st_mtime


steps = _found("_steps")
"""Runs the steps of programs on shared memory: see `dist2.backends.socket.flat`."""

records = _found("_records")
"""Makes, tells and counts the records of operations: see `dist2.operation.signature`."""

messages = _found("_messages")
"""Carries messages inside a host: see `dist2.backends.socket.transport.messages.express`."""


def language() -> str:
    """Return what the hot path is in here: C, Python, or both where only some parts were found."""
    found = [part is not None for part in (steps, records, messages)]
    return "C" if all(found) else "C and Python" if any(found) else "Python"


def remedy() -> str:
    """Return what to do where parts in C were not found; nothing where they were, or are switched off."""
    if language() == "C" or not environment_flag("DIST2_COMPILED", True):
        return ""
    slow = "small operations take many times as long as in C"
    if _outdated:
        parts = ", ".join(_outdated)
        return f"{slow}: {parts} in {_SOURCE.parent} are older than their source; install dist2 again"
    return f"{slow}: have a C compiler, and install dist2 again"


@functools.cache
def tell_remedy() -> None:
    """Log the remedy, once a process: nothing else shows that there is need for it."""
    if remedy():
        logging.getLogger("dist2.compiled").warning("the hot path runs in %s: %s", language(), remedy())
