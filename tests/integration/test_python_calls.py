"""How much Python a call runs inside a host: a budget for each of three walks.

The first call of a signature plans; later calls run in the extension. A budget is a little above the number
of calls of Python functions that were counted when it was set: an added mechanism on a walk exceeds it, and
so does a walk that leaves the extension. Lower it with each simplification. A rank that waits for others may
sleep, which is Python; the last one does not, so the least number of all ranks counts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch
from support.processes import run_processes

from dist2 import ProcessGroup

FIRST_OF_8_BYTES = 95
FIRST_OF_1_MIB = 150
REPEATED_OF_8_BYTES = 0


def python_calls(call: Callable[[], object]) -> Counter[CodeType]:
    """Return how often each Python function is called meanwhile."""
    counted: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counted[frame.f_code] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted


def first_call(pg: ProcessGroup, nbytes: int) -> int:
    pg.barrier()  # opens what every first operation opens
    tensor = torch.ones(nbytes // 4)
    counted = python_calls(partial(pg.all_reduce, tensor))
    assert tensor[0] == pg.size()
    return counted.total()


def repeated_call(pg: ProcessGroup) -> int:
    tensor = torch.ones(2)
    for _ in range(3):
        pg.all_reduce(tensor)
    pg.barrier()
    return python_calls(partial(pg.all_reduce, tensor)).total()


@pytest.mark.parametrize(
    ("nbytes", "budget"), [(8, FIRST_OF_8_BYTES), (1 << 20, FIRST_OF_1_MIB)], ids=["8 B", "1 MiB"]
)
def test_a_first_all_reduce_plans_within_its_budget(nbytes: int, budget: int, tmp_path: Path) -> None:
    counted = run_processes(4, first_call, tmp_path, nbytes)
    assert 0.8 * budget < min(counted) <= budget, f"below 0.8 of it, lower the budget {budget}: {counted}"


def test_a_repeated_all_reduce_runs_no_python(tmp_path: Path) -> None:
    counted = run_processes(4, repeated_call, tmp_path)
    assert min(counted) == REPEATED_OF_8_BYTES, counted
