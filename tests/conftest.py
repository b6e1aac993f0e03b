"""How all tests begin, and what tests of several folders need."""

from __future__ import annotations

import gc
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import promises
import pytest
from floor import on_the_floor

from dist2 import compiled

MAPPED_BYTES = 2 << 40
"""Where a process has more than this mapped after a test, what the test has left is collected."""


def pytest_configure(config: pytest.Config) -> None:
    """Have promises about time tried again, and take Ctrl-C.

    Also in the background, where Ctrl-C is ignored: what tests start would ignore it as well.
    """
    config.pluginmanager.register(promises)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    """Say what is said once a process before any test looks at what is logged."""
    compiled.tell_remedy()


def pytest_collection_finish() -> None:
    """Keep what was imported and collected, which all tests need, out of the garbage collector's way."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers run tests, run those last that are to run alone."""
    if _is_worker(config):
        items.sort(key=_is_alone)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test beside those of other workers, or alone; to wait for that is not part of its time."""
    if not _is_worker(item.config):
        return (yield)
    with on_the_floor(_is_alone(item)):
        return (yield)


def pytest_runtest_logfinish() -> None:
    """Unmap what tests have closed before it piles up.

    Ranks that are threads have a node each, which reserves 40 GiB of address space, though it uses a few
    pages. Nodes and groups refer to each other, so that all stays mapped until the garbage collector comes.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    if pages * resource.getpagesize() > MAPPED_BYTES:
        gc.collect()


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # of pytest-xdist


def _is_alone(item: pytest.Item) -> bool:
    """Tests under torchrun are, too: it looks for a port that is free, which others may take by then."""
    return any(item.get_closest_marker(name) for name in ("alone", "torchrun"))


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Allow this process what the strangers of a test need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
