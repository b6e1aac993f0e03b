"""The backend passes the tests that dist2 has for every backend."""

import pytest
import store_backend

from dist2.testing import BackendCase
from dist2.testing.collectives import *  # noqa: F403 - the tests
from dist2.testing.failures import *  # noqa: F403 - the tests
from dist2.testing.objects import *  # noqa: F403 - the tests
from dist2.testing.point_to_point import *  # noqa: F403 - the tests


@pytest.fixture
def tenant() -> BackendCase:
    return BackendCase("store", store_backend.NAME)


@pytest.fixture(params=[1, 2, 3])
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)
