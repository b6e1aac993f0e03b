"""The worker processes that a thread of this process waits for, such as those of a DataLoader.

A rank that waits in ``next(loader)`` is late because of a worker: the line of the worker is the reason. Which
processes are workers is asked of the kernel, and where they stand of py-spy: nothing in them has to answer.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch

from observability.frames import frames_of_threads
from observability.job.foreign_stacks import view_of
from observability.job.stacks import kernel_view, of_the_program_in

AFTER_S = 1.0
"""A thread that has been at its line for less does not wait."""
LOOK_S = 1.0
"""How long the looks at all workers may take; one that has begun is finished."""
WITHIN_S = 0.3
"""How long an answer waits for a look."""
KEPT_S = 10.0
"""How long a look is told."""
MOST = 2
"""Workers that are told."""
_WAITS = (
    *(f"{Path(str(module.__file__)).parent}/" for module in (multiprocessing, concurrent.futures)),
    f"{Path(torch.__file__).parent}/utils/data/",
)
"""Folders of the packages in which a thread waits for worker processes."""
_BEGINS = ("_worker_loop", "_bootstrap", "_process_worker")
"""Functions in which workers begin: frames further out are of the parent, before the fork."""


@attrs.define(eq=False)
class Workers:
    """The same for a rank that has to answer within a second: a look goes on behind the answer."""

    _told: str = ""
    _told_s: float = -KEPT_S
    _looking: threading.Thread | None = None

    def told(self, thread_id: int) -> str:
        """Say where the workers of a thread stood at the last look; begin another one."""
        if not _waits(thread_id):
            return ""
        if self._looking is None or not self._looking.is_alive():
            name = "dist2-workers"
            self._looking = threading.Thread(target=self._look, args=(thread_id,), name=name, daemon=True)
            self._looking.start()
        self._looking.join(WITHIN_S)
        return self._told if time.monotonic() - self._told_s < KEPT_S else ""

    def _look(self, thread_id: int) -> None:
        self._told, self._told_s = told_workers(thread_id), time.monotonic()


def told_workers(thread_id: int) -> str:
    """Say where the workers stand that a thread waits for; empty if it waits for none."""
    if not _waits(thread_id):
        return ""
    found: list[str] = []
    deadline = time.monotonic() + LOOK_S
    for pid in children():
        words = _told(pid)
        if words:
            found.append(f"its worker process {pid} {words}")
        if len(found) == MOST or time.monotonic() > deadline:
            break
    return "; ".join(found)


def _waits(thread_id: int) -> bool:
    with frames_of_threads() as frames:
        at: FrameType | None = frames.get(thread_id)
        while at is not None:
            if at.f_code.co_filename.startswith(_WAITS):
                return True
            at = at.f_back
    return False


def children() -> Iterator[int]:
    """Yield the ids of the child processes of this process."""
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            yield from map(int, path.read_text().split())
        except OSError:  # the thread has ended
            continue


def _told(pid: int) -> str:
    """Return what holds up a worker; empty if nothing is known, or if it waits for work."""
    kernel = kernel_view(pid)
    if kernel.state in ("T", "t", "D"):
        return f"({kernel.words})"
    view = view_of(pid)
    frames: list[dict[str, Any]] = next((each["frames"] for each in view.threads if each["main"]), [])
    frame = of_the_program_in(list(_of_worker(frames)))
    return "" if frame is None else f"is at {_place(frame)} (by {view.source})"


def _of_worker(frames: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in frames:
        if each["name"].rpartition(".")[2] in _BEGINS:  # names may be qualified
            return
        yield each


def _place(frame: dict[str, Any]) -> str:
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"
