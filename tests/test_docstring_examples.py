"""Every public name has an example in its docstring, and the examples run on both ranks of a group of two."""

from __future__ import annotations

import doctest
import inspect
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.ranks import TENANTS, run_ranks

import dist2
from dist2 import ProcessGroup, Store, StoreCollectives, Work
from dist2.backends import registry

INPROC = TENANTS[0]
NAMES = {"torch": torch, "dist2": dist2, "tempfile": tempfile, "timedelta": timedelta}
"""Modules and types that examples need not import."""


def is_ours(obj: object) -> bool:
    """Whether dist2 defines an object, and not torch."""
    return str(getattr(obj, "__module__", "")).startswith("dist2")


INTERNAL = {"Store.note_server"}
"""Methods that only other modules of dist2 call."""


def documented() -> Iterator[tuple[str, Any]]:
    """Yield the public names of dist2, and the methods and properties of its classes with many."""
    for name in dist2.__all__:
        if is_ours(getattr(dist2, name)):
            yield name, getattr(dist2, name)
    for kind in (ProcessGroup, Store, StoreCollectives, Work):
        for name in dir(kind):
            member = getattr(kind, name)
            defined = is_ours(member.fget if isinstance(member, property) else member)
            if defined and not name.startswith("_") and f"{kind.__name__}.{name}" not in INTERNAL:
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


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_a_public_name_has_an_example(name: str) -> None:
    assert steps_of(DOCUMENTED[name]), f"the docstring of {name} has no section `Examples:` with a >>> line"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the backends that examples register."""
    monkeypatch.setattr(registry, "_registered", {})


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
