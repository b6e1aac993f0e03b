"""Every public name has an example in its docstring and describes its arguments.

The examples run on both ranks of a group of two.
"""

from __future__ import annotations

import doctest
import inspect
import logging
import re
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import structlog
import torch
from support.ranks import TENANTS, run_ranks

import dist2
import observability
from dist2 import ProcessGroup, Store, StoreCollectives, Work
from dist2.backends import registry
from dist2.c10d.spellings import Elsewhere
from observability import FlightRecorder, LogInstrument, Metrics, Scrape, Server

INPROC = TENANTS[0]
NAMES = {
    "torch": torch,
    "dist2": dist2,
    "observability": observability,
    "structlog": structlog,
    "tempfile": tempfile,
    "timedelta": timedelta,
}
"""Modules and types that examples need not import."""


def is_ours(obj: object) -> bool:
    """Whether dist2 defines an object, and not torch."""
    return str(getattr(obj, "__module__", "")).startswith(("dist2", "observability"))


INTERNAL = {"Store.note_server", "Metrics.totals", "Server.close_inherited"}
"""Methods that only other modules of dist2 or observability call."""

OF_INSTRUMENTS = {"group_opened", "group_closed", "operation_started", "operation_finished"}
"""Methods that groups call: `add_instrument` has their example."""

OBSERVERS = (Scrape, Server, FlightRecorder, Metrics, LogInstrument)

MADE_BY_DIST2 = {"ProcessGroup", "Work", "Server"}
"""Classes whose constructor users do not call."""


def documented() -> Iterator[tuple[str, Any]]:
    """Yield the public names, and the methods and properties of the classes with many."""
    for package in (dist2, observability):
        for name in package.__all__:
            if is_ours(getattr(package, name)):
                yield name, getattr(package, name)
    for name in dist2.functional.__all__:
        yield f"functional.{name}", getattr(dist2.functional, name)
    for kind in (ProcessGroup, Store, StoreCollectives, Work, *OBSERVERS):
        for name in dir(kind):
            member = getattr(kind, name)
            defined = is_ours(member.fget if isinstance(member, property) else member)
            internal = (
                name.startswith("_") or f"{kind.__name__}.{name}" in INTERNAL or isinstance(member, Elsewhere)
            )
            if defined and not internal and not (kind in OBSERVERS and name in OF_INSTRUMENTS):
                yield f"{kind.__name__}.{name}", member


DOCUMENTED = dict(documented())


def steps_of(obj: object) -> list[doctest.Example]:
    """Return the steps of the examples in an object's own docstring."""
    return doctest.DocTestParser().get_examples(inspect.getdoc(obj) or "")


def run(steps: list[doctest.Example], names: dict[str, Any]) -> None:
    """Run steps one after the other; compare the value and the output of those that show one."""
    printed: list[str] = []
    names["print"] = lambda *values: printed.append(" ".join(map(str, values)))  # ranks share sys.stdout
    for step in steps:
        if doctest.SKIP in step.options:  # needs something else, such as torch's debug server
            continue
        code = step.source.strip()
        printed.clear()
        try:
            value = eval(code, names)
        except SyntaxError:
            exec(code, names)
        else:
            printed.append(repr(value))
        if step.want:
            assert "\n".join(printed) == step.want.strip(), code


def undescribed(name: str, obj: object) -> list[str]:
    """Return the parameters of a callable that its docstring does not describe."""
    if isinstance(obj, type) and issubclass(obj, Exception):
        return []  # raised by dist2
    try:
        parameters = inspect.signature(obj).parameters.values() if callable(obj) else []
    except ValueError:  # a class that torch defines in C++
        return []
    text = inspect.getdoc(obj) or ""
    named = [each.name for each in parameters if each.name != "self"]
    if name in MADE_BY_DIST2 or "args" in named:  # c10d's overloads
        return []
    return [each for each in named if not re.search(rf"^\s+\**{each}: \S", text, re.MULTILINE)]


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_a_public_name_has_an_example_and_describes_its_arguments(name: str) -> None:
    assert steps_of(DOCUMENTED[name]), f"the docstring of {name} has no section `Examples:` with a >>> line"
    assert not undescribed(name, DOCUMENTED[name])


def test_an_argument_without_a_description_is_seen() -> None:
    def double(value: int) -> int:
        """Return twice the value."""
        return 2 * value

    assert undescribed("double", double) == ["value"]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the backends that examples register, and restore the configuration of logs."""
    monkeypatch.setattr(registry, "_registered", {})
    configured, ours = structlog.get_config(), logging.getLogger("dist2")
    handlers, level, propagate = list(ours.handlers), ours.level, ours.propagate
    yield
    structlog.configure(**configured)
    ours.handlers, ours.propagate = handlers, propagate
    ours.setLevel(level)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_the_example_of_a_public_name_runs(name: str) -> None:
    finished = threading.Barrier(2)

    def body(pg: ProcessGroup) -> None:
        run(steps_of(DOCUMENTED[name]), {"pg": pg, **NAMES})
        finished.wait(10)  # a rank that leaves early would be lost to the other one

    run_ranks(2, body, INPROC)


@pytest.mark.parametrize("wrong", ["1 + 1\n    3", "if True:\n    ...     print(4)\n    5"])
def test_a_wrong_example_is_seen(wrong: str) -> None:
    with pytest.raises(AssertionError):
        run(doctest.DocTestParser().get_examples(f"Examples:\n    >>> {wrong}\n"), {})
