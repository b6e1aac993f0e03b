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
