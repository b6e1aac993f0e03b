"""Messages of every backend of dist2."""

from __future__ import annotations

import pytest
from support.ranks import TENANTS

from dist2.testing.point_to_point import *  # noqa: F403 - the tests

pytestmark = pytest.mark.parametrize("tenant", [tenant for tenant in TENANTS if tenant.p2p], ids=str)
