"""The start of all tests, and fixtures for tests of several folders."""

from __future__ import annotations

import functools
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import pytest
from support import time_limits, warm_interpreter

import dist2

os.environ["DIST2_INCIDENTS"] = "0"
"""Tests fail operations on purpose. Tests of incidents choose a folder."""
os.environ.pop("PYTHONUNBUFFERED", None)
"""With it, lines of several ranks on one stream mix: `print` writes a line and its end by two calls."""
hypothesis.settings.register_profile("dist2", deadline=None)
hypothesis.settings.load_profile("dist2")  # A busy machine is late; each test has its own timeout.
MAPPED_BYTES = 2 << 40
"""Address space that tests may map between two garbage collections."""
SLOW_S = 0.03
"""If a full collection takes so long, the objects that it has examined are excluded from later ones."""


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
        """Collect garbage between tests; if that took long, surviving objects are excluded from later
        collections."""
        gc.collect()
        if self.is_slow:
            gc.freeze()
        self.is_slow = False
        self.mapped_bytes = mapped_bytes()


collections = Collections()
gc.callbacks.append(collections.note)


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def out_of_date(folder: Path) -> list[str]:
    """Return the modules below a folder that were compiled before their sources changed."""
    return [
        str(source.relative_to(folder))
        for declared in folder.rglob("*.pxd")
        for source in (declared, declared.with_suffix(".py"), declared.with_suffix(".pyx"))
        for built in declared.parent.glob(f"{declared.stem}.*.so")
        if source.exists() and source.stat().st_mtime > built.stat().st_mtime
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Repeat tests that were late, and handle Ctrl-C.

    Also in the background, where Ctrl-C is ignored: child processes of tests would inherit that.
    """
    changed = out_of_date(Path(dist2.__file__).parent)
    if changed:
        pytest.exit(f"build again (python setup.py build_ext --inplace): {', '.join(changed)} changed", 2)
    config.pluginmanager.register(time_limits)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        warm_interpreter.use_server(config.workerinput["warm_interpreter"])


@functools.cache
def server_of_all() -> str:
    return warm_interpreter.start_server()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have all workers of pytest-xdist use one warm interpreter."""
    node.workerinput["warm_interpreter"] = server_of_all()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections, which would take a fourth of the time, in each worker.

    In the end, imported and collected objects, which all tests need, are excluded from later ones.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        collections.collect()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers run tests, start with those that run alone, then with slow ones.

    At the end they would wait for each other: the former for all workers, all for the last of the latter.
    """
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("alone", "slow")])


def pytest_runtest_logfinish() -> None:
    """Unmap the shared memory of ended tests before it piles up.

    Each rank that is a thread has a node, which reserves 40 GiB of address space, though it uses a few pages.
    Nodes and groups refer to each other, so that all stays mapped until the next garbage collection.
    """
    if collections.is_slow or mapped_bytes() > collections.mapped_bytes + MAPPED_BYTES:
        collections.collect()


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Allow this process the descriptors that a test's connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
