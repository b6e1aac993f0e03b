"""The conformance suite on MPI: each process of a job runs all tests, in the same order.

    mpiexec -n 3 python -m pytest tests/backends/mpi/conformance.py

`test_mpi` runs it. Tests of fewer ranks run on the first processes. All processes get the results of each
test, and fail if one fails.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

import dist2
from dist2 import ProcessGroup
from dist2.testing import BackendCase, RankFailed
from dist2.testing.collectives import *  # noqa: F403 - the tests
from dist2.testing.objects import *  # noqa: F403 - the tests
from dist2.testing.point_to_point import *  # noqa: F403 - the tests


@functools.cache
def everyone() -> ProcessGroup:
    torch.set_num_threads(1)
    return dist2.new_group("mpi", 60)


class Job(BackendCase):
    """Runs tests on groups of the first processes of the job."""

    def run(
        self, world_size: int, body: Callable[[ProcessGroup], Any], *, timeout: float = 20.0
    ) -> list[Any]:
        result, failure = None, None
        if everyone().rank() < world_size:
            try:
                with everyone().split(list(range(world_size)), timeout=timeout) as pg:
                    result = body(pg)
            except BaseException as error:  # noqa: BLE001 - raised below, on all processes
                failure = error
        ended = MPI.COMM_WORLD.allgather((result, failure and f"{type(failure).__name__}: {failure}"))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(ended) if text is not None]
        if failed:
            raise RankFailed("; ".join(failed)) from failure
        return [each for each, _ in ended[:world_size]]


del test_barrier  # noqa: F821 - its ranks share a list; `test_barrier_waits_for_all` is for processes


def test_barrier_waits_for_all(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        for late in range(pg.size()):
            if pg.rank() == late:
                time.sleep(0.05)
            entered = time.monotonic()
            pg.barrier()
            left = time.monotonic()
            times = pg.all_gather_object((entered, left))
            assert max(entered for entered, _ in times) <= min(left for _, left in times)

    tenant.run(3, body)


pytestmark = pytest.mark.parametrize("tenant", [Job("mpi", "mpi", complete=True)], ids=str)


@pytest.fixture(params=[*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2)), 3])
def world_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size
