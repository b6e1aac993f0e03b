"""How all tests begin, and what tests of several folders need."""

from __future__ import annotations

import gc
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from support import time_limits

from dist2 import compiled

MAPPED_BYTES = 2 << 40
"""Where tests have mapped this much more since the last collection, what they have left is collected."""
SLOW_S = 0.03
"""Where a full collection takes so long, what it has looked through is taken out of the collector's way."""


@attrs.define
class Collections:
    """The garbage collections of this process.

    Attributes:
        mapped_bytes: Address space in use after the last one between tests.
        is_slow: One since then took longer than `SLOW_S`: torch._dynamo was imported, say.
        began_s: When the one under way began.
    """

    mapped_bytes: int = 0
    is_slow: bool = False
    began_s: float = 0.0

    def note(self, phase: str, info: dict[str, int]) -> None:
        """Take the time of a collection: called by the garbage collector."""
        if phase == "start":
            self.began_s = time.monotonic()
        elif info["generation"] == 2 and time.monotonic() > self.began_s + SLOW_S:
            self.is_slow = True

    def collect(self) -> None:
        """Collect garbage between tests; what stays is not looked through again if that took long."""
        gc.collect()
        if self.is_slow:
            gc.freeze()
        self.is_slow = False
        self.mapped_bytes = mapped_bytes()


collections = Collections()
gc.callbacks.append(collections.note)


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def pytest_configure(config: pytest.Config) -> None:
    """Repeat tests that were late, and take Ctrl-C.

    Also in the background, where Ctrl-C is ignored: what tests start would ignore it as well.
    """
    config.pluginmanager.register(time_limits)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    """Say what is said once a process before any test looks at what is logged."""
    compiled.tell_remedy()


def pytest_collection_finish() -> None:
    """Keep what was imported and collected, which all tests need, out of the garbage collector's way."""
    collections.collect()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers run tests, run those first that are to run alone: later they wait for others."""
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items.sort(key=lambda item: item.get_closest_marker("alone") is None)


def pytest_runtest_logfinish() -> None:
    """Unmap what tests have closed before it piles up.

    Ranks that are threads have a node each, which reserves 40 GiB of address space, though it uses a few
    pages. Nodes and groups refer to each other, so that all stays mapped until the garbage collector comes.
    """
    if collections.is_slow or mapped_bytes() > collections.mapped_bytes + MAPPED_BYTES:
        collections.collect()


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Allow this process what the strangers of a test need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
