"""Backends that packages register with torch pass the tests that dist2's own pass."""

from __future__ import annotations

import pytest
from support.ranks import Tenant
from support.torch_features import require
from support.torch_plugins import KINDS

from dist2.testing.collectives import *  # noqa: F403 - the tests
from dist2.testing.objects import *  # noqa: F403 - the tests
from dist2.testing.point_to_point import *  # noqa: F403 - the tests

QUICK = ("compiled", "store")
"""One in C++ and one in Python: the others differ from them by how the creator is called."""
COMPLEX = ("test_conjugated_views", "test_memory_layouts")
"""Tests with complex numbers, which the backend in C++ must take: it is torch's Gloo."""


@pytest.fixture(
    params=[pytest.param(kind, marks=() if kind in QUICK else pytest.mark.exhaustive) for kind in KINDS]
)
def tenant(request: pytest.FixtureRequest) -> Tenant:
    if request.param == "compiled" and any(name in request.node.name for name in COMPLEX):
        require("gloo_complex")
    return Tenant(request.param, request.param, bitwise=False, complete=False)


@pytest.fixture(params=[2])
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)
