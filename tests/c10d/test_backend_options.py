"""The options of a group's backend, as c10d describes them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from support.torch_features import has

import dist2
from dist2.c10d import backend
from dist2.runtime import torch_versions


class OldOptions:
    """Options as torch 2.8 has them: without a group name and ranks."""

    __slots__ = ("_timeout", "backend")

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.backend, self._timeout = name, timeout


@pytest.fixture
def view() -> Any:
    with dist2.new_group("fake", 7, store=dist2.HashStore(), rank=0, world_size=2) as pg:
        yield pg._get_backend("cpu")


def test_options_have_the_groups_settings(view: Any) -> None:
    assert view.options._timeout == timedelta(seconds=7)
    if has("options"):
        assert view.options.global_ranks_in_group == [0, 1]


def test_options_of_an_older_torch_have_what_they_can(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend._c10d.Backend, "Options", OldOptions)
    monkeypatch.setattr(torch_versions, "OPTIONS_NAME_THE_GROUP", False)
    assert view.options._timeout == timedelta(seconds=7)
