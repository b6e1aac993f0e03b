"""Every decoder takes any bytes: it accepts them or refuses them, and does nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzzing.targets import SEEDS, TARGETS, bounded


def examples(seeds: list[bytes]) -> Callable[[Any], Any]:
    """Try these before any other."""
    return lambda test: functools.reduce(lambda decorated, seed: example(data=seed)(decorated), seeds, test)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100)
@given(data=st.binary(max_size=512))
@examples(SEEDS)
def test_any_bytes_are_taken_or_refused(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_lengths_are_not_believed(name: str) -> None:
    """No decoder allocates the size that a peer announces."""
    for data in (*SEEDS, b"\x7f" * 200, b"\xdd\xff\xff\xff\xff", b"\x00" * 7 + b"\x7f" + b"\x00" * 100):
        with bounded(data):
            TARGETS[name](data)
