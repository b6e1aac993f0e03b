"""Fixtures shared by the tests of message paths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.endpoint_pairs import Side, two_sides

from dist2.compiled import messages


@pytest.fixture(params=["python", "c"])
def in_c(request: pytest.FixtureRequest) -> bool:
    """Whether short paths are those in C; a test that asks runs with either."""
    if request.param == "c" and messages is None:
        pytest.skip("needs the parts in C")
    return bool(request.param == "c")


@pytest.fixture
def sides(in_c: bool) -> Iterator[tuple[Side, Side]]:
    """Two ranks that have rings, and the same short path."""
    with two_sides(in_c=(in_c, in_c)) as both:
        yield both
