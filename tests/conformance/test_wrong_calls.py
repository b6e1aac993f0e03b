"""Wrong calls, missing and lost ranks, on every backend of dist2 and on backends of other packages."""

from __future__ import annotations

import attrs
import pytest
from support.ranks import TENANTS, plugin_tenants

from dist2.testing.failures import *  # noqa: F403 - the tests

STRICT = [
    attrs.evolve(tenant, options={**tenant.options, "strict": True}) if tenant.backend == "nccl" else tenant
    for tenant in TENANTS
]
pytestmark = pytest.mark.parametrize("tenant", [*STRICT, *plugin_tenants()], ids=str)
