"""One pool of ranks for all tests here, and the backends they run over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from legacy.jobs import WORLD_SIZE, begin, end
from legacy.pool import RankPool

BACKENDS = ("gloo", "socket")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Yield four processes without a group."""
    pool = RankPool(WORLD_SIZE)
    yield pool
    pool.close()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(ranks: RankPool, backend: str, tmp_path: Path) -> Iterator[RankPool]:
    """Yield four processes that have called `dist2.legacy.init_process_group`."""
    ranks.run(begin, "dist2", backend, f"file://{tmp_path}/dist2")
    yield ranks
    ranks.run(end, "dist2")


@pytest.fixture
def job_beside_torch(job: RankPool, tmp_path: Path) -> Iterator[RankPool]:
    """Yield processes that have initialised torch's own package too, over Gloo."""
    job.run(begin, "torch", "gloo", f"file://{tmp_path}/torch")
    yield job
    job.run(end, "torch")
