"""Inputs and outputs that share memory are found to the byte."""

from __future__ import annotations

import pytest
import torch

from dist2.operation.aliasing import Overlap, shared_places


@pytest.mark.parametrize(("begin", "offset"), [(3, -3), (4, None), (5, None)])
def test_one_byte_in_common_is_found_and_none_between_neighbours(begin: int, offset: int | None) -> None:
    memory = torch.empty(16, dtype=torch.uint8)
    first, second = memory[:4], memory[begin : begin + 4]
    overlap = () if offset is None else (Overlap(0, 0, offset),)
    assert shared_places([first], [second]) == ((overlap, ()) if overlap else ())
    outputs = [first, second]
    assert shared_places(outputs, outputs) == (((), (Overlap(0, 1, -begin),)) if overlap else ())
