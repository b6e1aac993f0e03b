"""Where the threads of a process stand: of this one in Python, of a neighbour as the kernel tells it.

Nothing here reads a source file: a diagnosis must not wait for the disk that a rank may be stuck on.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch

from dist2.operation.awaiting import wait_in_thread
from dist2.operation.record import Operation
from dist2.operation.runner import LIBRARY_PATHS
from dist2.runtime.code_marks import folders_of
from dist2.runtime.other_process import Process
from observability.frames import frames_of_threads
from observability.job.foreign_stacks import View, view_of

MAX_FRAMES = 64
MAX_THREADS = 256
MAX_MESSAGE = 300
OVERLOAD = 4.0
"""From this load average for each core on, a process may be silent for want of time."""

_OBSERVABILITY = str(Path(__file__).parent.parent)
_OURS = (*LIBRARY_PATHS, _OBSERVABILITY)
_ROOTS = (
    (_OBSERVABILITY, "observability"),
    *((root, "torch") for root in folders_of(torch.__spec__)),
    *((root, "dist2") for root in LIBRARY_PATHS),
)
"""Folders of libraries, and their names."""
_PYTHONS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_STATES = {
    "T": "stopped (by a signal)",
    "t": "stopped (by a debugger)",
    "D": "in a system call that cannot be interrupted (a disk or network file system)",
    "R": "running",
    "S": "asleep",
    "Z": "dead",
    "X": "dead",
}
_VFORKED = "waiting for a child of vfork to call exec or to end"
_IN_VFORK = frozenset({"kernel_clone", "do_fork", "_do_fork", "wait_for_vfork_done"})
"""Functions of kernels in which a process waits for that, in state D as well."""


def stacks() -> list[dict[str, Any]]:
    """Return the Python threads of this process with their frames, the innermost frame first.

    The main thread is the first, and of `MAX_THREADS` at most.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    with frames_of_threads() as frames:
        handled = sys._current_exceptions()
        in_order = sorted(frames, key=lambda ident: ident != main)  # Python has the latest thread first
        return [
            _thread(ident, frames[ident], threads.get(ident), handled.get(ident))
            for ident in in_order[:MAX_THREADS]
        ]


def position(thread_id: int) -> dict[str, Any]:
    """Return where a thread of this process stands in user code; the main thread if that has ended.

    Returns:
        ``place`` (``job.py:22 in load``), ``file``, ``line``; ``inside``: the outermost function of a library
        that the user code called (``dist2's new_group``, ``torch's save``), or None; ``library``: the package
        of the innermost frame (``torch.autograd``, ``dist2``), or empty; ``exception``: the one that the
        thread is handling, or None.
    """
    with frames_of_threads() as frames:
        return _position(thread_id, frames)


def _position(thread_id: int, frames: dict[int, FrameType]) -> dict[str, Any]:
    if thread_id not in frames:
        thread_id = threading.main_thread().ident or 0
    frame = frames.get(thread_id)
    found: dict[str, Any] = {"place": "", "file": "", "line": 0, "inside": None, "library": ""}
    found["exception"] = _words(sys._current_exceptions().get(thread_id))
    if frame is None:
        return found
    found["library"] = _library_of(frame)
    innermost = frame = _outside_of_libraries(frame)
    called = _called_from(frame, frames[thread_id])
    inside = None if called is None else f"{_library_of(called).partition('.')[0]}'s {called.f_code.co_name}"
    frame = _of_the_program(frame)
    place = _place(frame) if frame is innermost else f"{_place(frame)}, inside of {_place(innermost)}"
    line = frame.f_lineno or 0
    return {**found, "place": place, "file": frame.f_code.co_filename, "line": line, "inside": inside}


def _outside_of_libraries(frame: FrameType) -> FrameType:
    """Return the innermost frame of the program, or of a package that torch or dist2 did not call."""
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _called_from(caller: FrameType, innermost: FrameType) -> FrameType | None:
    """Return the frame that a frame has called; None if it is the innermost."""
    at: FrameType | None = innermost
    while at is not None and at.f_back is not caller:
        at = at.f_back
    return at if at is not caller else None


def _library_of(frame: FrameType) -> str:
    """Return the package of a frame, two names deep, if it is of torch or dist2; else empty."""
    name = frame.f_code.co_filename
    for root, package in _ROOTS:
        if name.startswith(root):
            inner = name.removeprefix(root).strip("/").split("/")
            return package if package != "torch" or len(inner) < 2 else f"{package}.{inner[0]}"
    return ""


def awaited_of(operations: Collection[Operation]) -> set[Operation]:
    """Return the operations for whose Work a thread of this process waits."""
    found = set()
    with frames_of_threads() as frames:
        for thread in frames:
            at: FrameType | None = frames[thread]
            while at is not None:
                if at.f_code is wait_in_thread.__code__:
                    found.add(at.f_locals["operation"])
                at = at.f_back
    return found.intersection(operations)


def _of_the_program(frame: FrameType) -> FrameType:
    """Return the innermost frame that is neither Python's own nor of an installed package; else the given."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith((*_PYTHONS, *_OURS, "<frozen")):
        at = at.f_back
    return frame if at is None else at


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno or 0} in {frame.f_code.co_name}"


def _thread(ident: int, frame: FrameType, thread: threading.Thread | None, handled: object) -> dict[str, Any]:
    at: FrameType | None = frame
    while ident == threading.get_ident() and at is not None and _is_of_this_look(at):
        at = at.f_back
    frames: list[dict[str, Any]] = []
    while at is not None and len(frames) < MAX_FRAMES:
        code = at.f_code
        frames.append({"name": code.co_qualname, "file": code.co_filename, "line": at.f_lineno or 0})
        at = at.f_back
    return {
        "name": f"thread {ident}" if thread is None else thread.name,
        "main": thread is threading.main_thread(),
        "native_id": None if thread is None else thread.native_id,
        "exception": _words(handled),
        "frames": frames,
    }


def _is_of_this_look(frame: FrameType) -> bool:
    """Whether a frame of the thread that reads the stacks is there only for that."""
    return frame.f_code.co_filename.startswith(_OBSERVABILITY)


def _words(handled: object) -> str | None:
    """Return an exception in words; Python 3.11 gives a tuple of type, value and traceback."""
    error = handled[1] if isinstance(handled, tuple) else handled
    if not isinstance(error, BaseException):
        return None
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]


@attrs.frozen
class Outside:
    """A process of this host, seen from another one.

    Attributes:
        state: The kernel's letter; empty where there is no such process.
        words: The meaning of that.
        cause: Why a process in this state may accept a request and not answer; empty where `words` say it.
        threads: Name, state and kernel function of each thread.
        stands: Where its main thread stands in Python, in words; empty where that cannot be seen.
        python: Its Python threads, as in the answer of ``/stacks``.
        unseen: Why it cannot be seen where its main thread stands, and the remedy; empty where it can.
    """

    state: str
    words: str
    threads: tuple[dict[str, str], ...] = ()
    cause: str = ""
    stands: str = ""
    python: tuple[dict[str, Any], ...] = ()
    unseen: str = ""


def look_at(process: Process) -> Outside | None:
    """Say how a process of this host is, without its help; None for one of another host."""
    here = Process.here()
    if (process.host, process.space) != (here.host, here.space):
        return None
    if process.has_ended:
        return Outside("", f"process {process.pid} has ended")
    return look_at_pid(process.pid)


def look_at_pid(pid: int) -> Outside:
    """Say how a process of this host is, without its help, and where it stands in Python."""
    found = kernel_view(pid)
    if not found.state or pid == os.getpid():
        return found
    view = view_of(pid)
    place = _stands(view)
    stands = f"{place} (by {view.source})" if place else ""
    return attrs.evolve(found, stands=stands, python=view.threads, unseen="" if place else view.reason)


def _stands(view: View) -> str:
    """Return where the main thread of another process stands, in words; empty if that is unknown."""
    frames = next((each["frames"] for each in view.threads if each["main"]), None)
    if not frames:
        return view.position
    frame = of_the_program_in(frames) or frames[0]
    return f"its main thread is at {Path(frame['file']).name}:{frame['line']} in {frame['name']}"


def of_the_program_in(frames: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the innermost frame of another process that is of its program; None if there is none."""
    libraries = (*_PYTHONS, *_OURS, "<")
    return next((each for each in frames if not each["file"].startswith(libraries)), None)


def kernel_view(pid: int) -> Outside:
    """Say how a process of this host is, as the kernel tells it."""
    threads = _tasks(pid)
    if not threads or threads[0]["state"] in ("Z", "X"):
        return Outside("", f"process {pid} has ended")
    main = threads[0] if threads else {"state": "", "wchan": ""}
    state = main["state"]
    if state in "TtD" and state:
        where = f", in {main['wchan']}" if state == "D" and main["wchan"] else ""
        activity = _VFORKED if state == "D" and main["wchan"] in _IN_VFORK else _STATES[state]
        return Outside(state, f"process {pid} is {activity}: state {state}{where}", threads)
    activity = _STATES.get(state, "in an unknown state")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    cause = "code in C holds the interpreter lock (GIL)"
    if load > OVERLOAD * cores:
        cause += f", or it gets no time: the load of its host is {load:.0f} on {cores} cores"
    words = f"process {pid} is {activity} (state {state or '?'})"
    return Outside(state, words, threads, f"its control plane does not run: {cause}")


def _tasks(pid: int) -> tuple[dict[str, str], ...]:
    """Return the threads of a process, its main thread first."""
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    except OSError:
        return ()
    found = [task for path in tasks[:MAX_THREADS] if (task := _task(path)) is not None]
    return tuple(found)


def _task(path: Path) -> dict[str, str] | None:
    try:
        head, _, rest = (path / "stat").read_text().rpartition(")")
    except OSError:
        return None
    try:
        wchan = (path / "wchan").read_text().strip("0")
    except OSError:
        wchan = ""
    return {"id": path.name, "name": head.partition("(")[2], "state": rest.split()[0], "wchan": wchan}
