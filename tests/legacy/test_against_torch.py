"""The same calls over dist2's global API and over torch's give the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from legacy.cases import CASES
from legacy.jobs import run_case
from legacy.pool import RankPool
from support.torch_features import require

NEEDS = {
    "broadcast": "gloo_complex",
    "all_gather_single": "single",
    "deprecated_spellings": "single",  # torch deprecated the other names when it added this one
    "reduce_scatter": "single",
    "all_to_all": "gloo_alltoall",
    "unsorted_group": "sort_ranks",
}
"""The feature of torch that a case compares with, where older versions lack it."""


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.__name__ for case in CASES])
def test_results_are_those_of_torch(job_beside_torch: RankPool, number: int) -> None:
    if (feature := NEEDS.get(CASES[number].__name__)) is not None:
        require(feature)
    ours = job_beside_torch.run(run_case, "dist2", number)
    theirs = job_beside_torch.run(run_case, "torch", number)
    for rank, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(got, expected, f"rank {rank}")


def assert_same(got: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(got[key], value, f"{where}[{key!r}]")
    else:
        assert got == expected, where


def test_the_table_is_whole() -> None:
    names = [case.__name__ for case in CASES]
    assert len(set(names)) == len(names) > 15
    assert NEEDS.keys() <= set(names)
