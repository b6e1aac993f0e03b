"""Backends that packages register with torch pass the tests that dist2's own pass."""

from __future__ import annotations

import pytest
from support.ranks import Tenant
from support.torch_plugins import KINDS

from dist2.testing.collectives import *  # noqa: F403 - the tests
from dist2.testing.objects import *  # noqa: F403 - the tests
from dist2.testing.point_to_point import *  # noqa: F403 - the tests

QUICK = ("compiled", "store")
"""One in C++ and one in Python: the others differ from them by how the creator is called."""


@pytest.fixture(
    params=[pytest.param(kind, marks=() if kind in QUICK else pytest.mark.exhaustive) for kind in KINDS]
)
def tenant(request: pytest.FixtureRequest) -> Tenant:
    return Tenant(request.param, request.param, bitwise=False, complete=False)


@pytest.fixture(params=[2])
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)
