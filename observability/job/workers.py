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
from observability.job.foreign_stacks import INSTALL, view_of
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
MOST_UNREAD = 8
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
    found, unread = list[str](), list[int]()
    deadline = time.monotonic() + LOOK_S
    for pid in worker_processes():
        words = _told(pid)
        if words is None:
            unread.append(pid)
        elif words:
            found.append(f"its worker process {pid} {words}")
        if len(found) == MOST or time.monotonic() > deadline:
            break
    if unread and not found:
        numbers = ", ".join(map(str, unread[:MOST_UNREAD]))
        found.append(f"it waits for a worker process ({numbers}), whose line needs py-spy: {INSTALL}")
    return "; ".join(found)


def _waits(thread_id: int) -> bool:
    with frames_of_threads() as frames:
        at: FrameType | None = frames.get(thread_id)
        while at is not None:
            if at.f_code.co_filename.startswith(_WAITS):
                return True
            at = at.f_back
    return False


def worker_processes() -> Iterator[int]:
    """Yield the processes that this one has started: its children, or those of its fork server."""
    for pid in _children_of("self"):
        command = _command(pid)
        if b"multiprocessing.forkserver" in command:
            yield from _children_of(pid)
        elif b"multiprocessing.resource_tracker" not in command:
            yield pid


def _children_of(process: int | str) -> Iterator[int]:
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            yield from map(int, path.read_text().split())
        except OSError:  # the thread has ended
            continue


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _told(pid: int) -> str | None:
    """Return what holds up a worker; empty if it waits for work, None if it cannot be read."""
    kernel = kernel_view(pid)
    if kernel.state in ("T", "t", "D"):
        return f"({kernel.words})"
    view = view_of(pid)
    if not view.threads:
        return None
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
