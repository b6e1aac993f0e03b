"""Fixtures shared by the tests of message paths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.endpoint_pairs import Side, two_sides


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Two ranks that have rings."""
    with two_sides() as both:
        yield both
