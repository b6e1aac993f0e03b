"""Reductions as values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import dist2
from dist2.operation.kinds import SUM

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda op: pickle.loads(pickle.dumps(op)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("op", [SUM, dist2.premul_sum(0.25)], ids=str)
def test_a_copy_is_the_one_instance(how: str, op: Any) -> None:
    assert COPIES[how](op) is op


def test_each_factor_is_another_reduction() -> None:
    """The sign of a zero is that of the results, and ranks compare it."""
    plus, minus = dist2.premul_sum(0.0), dist2.premul_sum(-0.0)
    assert (str(plus), str(minus)) == ("premul_sum(0.0)", "premul_sum(-0.0)")
    assert dist2.premul_sum(float("nan")) is dist2.premul_sum(float("nan"))
