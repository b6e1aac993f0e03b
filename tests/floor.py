"""The floor that tests run on, where pytest has several workers: side by side, or one alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOOR, FLOOR = Path(__file__).parent, Path(__file__)
"""What is locked: a path that is there, so that nothing has to be made and removed."""


@contextmanager
def on_the_floor(alone: bool) -> Iterator[None]:
    """Be on the floor while others are, or alone: no later than those who come to the door afterwards."""
    with _locked(FLOOR) as floor:
        with _locked(DOOR) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Yield a descriptor to lock; what was locked is free afterwards, also where a child process has it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
