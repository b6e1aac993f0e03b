"""Object collectives of every backend of dist2."""

from __future__ import annotations

import pytest
from support.ranks import TENANTS

from dist2.testing.objects import *  # noqa: F403 - the tests

pytestmark = pytest.mark.parametrize("tenant", TENANTS, ids=str)
