"""Resources of a process that must be released: descriptors, threads, children, shared memory."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections import Counter
from pathlib import Path

SETTLE_S = 4.0
"""Time until released resources must be returned: threads poll for jobs a little longer."""

_OURS = ("dist2", "torch")
"""Other programs of this machine come and go in /dev/shm, too."""

_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


def holdings() -> Counter[str]:
    """Return the resources of this process, by kind."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[f"descriptor {_NUMBER.sub('N', str(entry.readlink()))}"] += 1
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    found.update(f"thread {_NUMBER.sub('N', thread.name)}" for thread in threading.enumerate())
    for entry in Path("/proc/self/task").glob("*/children"):
        try:
            found["child process"] += len(entry.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # that thread has ended meanwhile
    found.update(f"segment {path}" for path in segments())
    return +found


def segments() -> set[Path]:
    """Return named shared memory of this machine that may belong to programs like this one."""
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(_OURS)}


def segments_since(before: set[Path]) -> set[Path]:
    """Return the segments that are new and stay: those of tests of other workers have a name for a moment."""
    deadline = time.monotonic() + SETTLE_S
    while (new := segments() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return new


def kept_since(before: Counter[str]) -> Counter[str]:
    """Return the resources of this process beyond those before, once that no longer shrinks."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        more = holdings() - before
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.02)
