"""Tests that need a GPU: marked so, and skipped with the reason where there is none."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from dist2.backends.nccl.library import load
from dist2.errors import BackendUnavailableError


def _missing() -> str | None:
    """Return why NCCL cannot be used here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cupy, about its surroundings
            load()
    except BackendUnavailableError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where they cannot run."""
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    why = _missing() if own else None
    for item in own:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(120))
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
