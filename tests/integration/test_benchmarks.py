"""Benchmarks run: they replace and read parts of the library that no user sees, and break with them."""

from __future__ import annotations

import sys

import pytest
from support.programs import ROOT, run

COMMANDS = [
    "recording_cost.py --rounds 1 --calls 10",
    "recording_cost.py --rounds 1 --calls 10 --transport tcp",
    "everyday.py --ranks 2 --cases barrier objects --rounds 1 --name smoke",
    "groups.py --rounds 2 --groups 2",
    "group_creation.py --rounds 2",
    "verification_cost.py --rounds 1",
    "job_view.py --ranks 16 --processes 1 --times 1",
    "overlap.py --mib 1 --rounds 1 --situation cores",
    "point_to_point.py --sizes 8 --rounds 1 --name smoke",
    "store_barrier.py --clients 4 --rounds 1",
    "training.py --ranks 2 --rounds 2",
    "large.py --mib 1 --rounds 1",
]


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs(command: str) -> None:
    script, *arguments = command.split()
    ended = run([sys.executable, ROOT / "benchmarks" / script, *arguments], timeout_s=180)
    assert ended.code == 0, ended
