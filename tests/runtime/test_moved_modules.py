"""Old import paths of public names work, and say where the module is now."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import dist2
from dist2._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_leads_to_the_module_and_warns(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved: import {MOVED[old]}"):
        found = import_module(old)
    assert found is import_module(MOVED[old])
    monkeypatch.delitem(sys.modules, old)


def test_an_old_attribute_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist2, "registry", raising=False)  # the import system sets it
    monkeypatch.delitem(sys.modules, "dist2.registry", raising=False)
    with pytest.warns(DeprecationWarning):
        assert dist2.registry.register_backend is dist2.register_backend
    sys.modules.pop("dist2.registry")


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("dist2.never_was")
    with pytest.raises(AttributeError):
        getattr(dist2, "never_was")  # noqa: B009 - a type checker would refuse it
