"""A lock between the workers of pytest: tests run side by side, or one alone.

The lock is fair: a test that waits to run alone keeps later tests from starting.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUEUE, RUNNING = Path(__file__).parent, Path(__file__)
"""Paths that exist already, so that no lock file has to be made and removed."""


@contextmanager
def running(alone: bool) -> Iterator[None]:
    """Hold the lock in a `with` block: shared, or exclusively where the test runs alone."""
    with _opened(RUNNING) as descriptor:
        with _opened(QUEUE) as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a descriptor to lock. The lock is released in the end even if a child holds the descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
