"""Collectives of every backend of dist2."""

from __future__ import annotations

import pytest
from support.ranks import TENANTS

from dist2.testing.collectives import *  # noqa: F403 - the tests

pytestmark = [
    pytest.mark.parametrize("tenant", TENANTS, ids=str),
    pytest.mark.parametrize("world_size", (1, 2, 3, 4)),
]
