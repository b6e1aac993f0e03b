"""How all tests begin, and what tests of several folders need."""

from __future__ import annotations

import gc
import resource
import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Take Ctrl-C, also in the background, where it is ignored: what tests start would ignore it as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep what was imported and collected, which all tests need, out of the garbage collector's way."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Allow this process what the strangers of a test need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
