"""Python stacks of a process of this host that cannot answer: stopped, or with the interpreter lock held.

Theory of operation. Three sources, the best first. py-spy, where it is installed (extra ``stacks``) and the
kernel permits it, reads the memory of the process. A signal makes a process with a control plane write its
stacks (`faulthandler`, which needs no interpreter lock) into memory that others can open; it is sent to the
thread of the control plane, so that no call of the program is interrupted. A process that is stopped handles
no signal: of it the position of its main thread remains, which its watch writes each two seconds.

Memory is a memfd, opened by way of ``/proc/PID/fd``: the kernel lets only the same user do that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

PYSPY_S = 5.0
SIGNAL_S = 0.5
"""How long a process may take to write its stacks."""
FRESH_S = 3.0
"""A view that is no older is given again: pages ask once a second."""
INSTALL = "pip install 'dist2[stacks]'"
MAX_FRAMES = 64
_THREAD = re.compile(r"(?m)^(?:Thread|Current thread) 0x[0-9a-f]+.*$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

Thread = dict[str, Any]
"""A thread as in the answer of ``/stacks``."""


@attrs.frozen
class View:
    """What of a process can be seen from outside.

    Attributes:
        threads: Its Python threads, the main thread last; empty if they cannot be read.
        position: Where its main thread was when last seen, in words; empty if unknown.
        source: How that was found.
        reason: Why nothing was found.
    """

    threads: tuple[Thread, ...] = ()
    position: str = ""
    source: str = ""
    reason: str = ""


@attrs.frozen
class Beacon:
    """Where others find the stacks of this process.

    Attributes:
        number: The signal that makes it write them.
        thread: The kernel's id of the thread that the signal is sent to.
        stacks: Descriptor of the memory that it writes to.
        position: Descriptor of the memory with the position of its main thread.
    """

    number: int
    thread: int
    stacks: int
    position: int


class _Memory:
    """The memory of this process that its neighbours read, shared by its control planes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._number = self._stacks = self._position = -1

    def opened(self, thread: int) -> Beacon | None:
        """Return where others find the stacks; None if no signal is free."""
        with self._lock:
            if not self._users and not self._open():
                return None
            self._users += 1
            return Beacon(self._number, thread, self._stacks, self._position)

    def closed(self) -> None:
        """Take one back that was opened; the last one ends it."""
        with self._lock:
            self._users -= 1
            if not self._users:
                faulthandler.unregister(self._number)
                os.close(self._stacks)
                os.close(self._position)
                self._number = self._stacks = self._position = -1

    def note(self, place: str) -> None:
        """Write the position of the main thread."""
        with self._lock:
            if self._users:
                text = json.dumps([time.monotonic(), place]).encode()
                os.pwrite(self._position, text.ljust(512)[:512], 0)

    def forget(self) -> None:
        """Let go of the memory of the parent, in a forked child."""
        self._lock = threading.Lock()
        if self._users:
            self._users = 1
            self.closed()

    def _open(self) -> bool:
        free = (number for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if _is_free(number))
        number = next(free, None)
        if number is None:
            return False
        self._number = number
        self._stacks = os.memfd_create("dist2-stacks", os.MFD_CLOEXEC)
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)  # readers cut it off
        self._position = os.memfd_create("dist2-position", os.MFD_CLOEXEC)
        faulthandler.register(number, self._stacks, all_threads=True, chain=False)
        return True


memory = _Memory()


def _is_free(number: int) -> bool:
    with suppress(ValueError, OSError):
        return signal.getsignal(number) is signal.SIG_DFL
    return False


_views: dict[int, tuple[float, View]] = {}


def view_of(pid: int) -> View:
    """Return what of another process of this host can be seen."""
    known = _views.get(pid)
    if known is not None and time.monotonic() - known[0] < FRESH_S:
        return known[1]
    by_pyspy = _by_pyspy(pid)
    found = by_pyspy if by_pyspy.threads else _by_signal(pid) or _last_seen(pid) or by_pyspy
    if len(_views) > 256:
        _views.clear()
    _views[pid] = time.monotonic(), found
    return found


# py-spy


def pyspy(pid: int, *options: str) -> tuple[str, str]:
    """Return the output of ``py-spy dump`` and the reason for none."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=Path(sys.executable).parent)
    if program is None:
        return "", f"py-spy is not installed: {INSTALL}"
    command = [program, "dump", "--pid", str(pid), *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PYSPY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy failed: {error}"
    return (
        (done.stdout, "")
        if not done.returncode
        else ("", f"py-spy failed: {' '.join(done.stderr.split())[:300]}")
    )


def _by_pyspy(pid: int) -> View:
    text, reason = pyspy(pid, "--json", "--nonblocking")
    with suppress(ValueError, KeyError, TypeError):
        threads = tuple(
            {
                "name": each["thread_name"] or f"thread {each['os_thread_id']}",
                "main": each["os_thread_id"] == pid,
                "native_id": each["os_thread_id"],
                "exception": None,
                "frames": [
                    {"name": frame["name"], "file": frame["filename"], "line": frame["line"]}
                    for frame in each["frames"][:MAX_FRAMES]
                ],
            }
            for each in json.loads(text)
        )
        if threads:
            return View(threads, source="py-spy")
    return View(reason=reason)


# A signal


def _beacons(pid: int) -> Iterator[Beacon]:
    from observability.token_files import control_planes

    for each in control_planes():
        if each.process.pid == pid and each.beacon:
            with suppress(TypeError):
                yield Beacon(**each.beacon)


def _by_signal(pid: int) -> View | None:
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    for beacon in _beacons(pid):
        with suppress(OSError):
            if tgkill is None or _is_stopped(pid):
                continue
            memory = os.open(f"/proc/{pid}/fd/{beacon.stacks}", os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(memory, 0)
                if tgkill(pid, beacon.thread, beacon.number) == 0:
                    threads = _parsed(_written(memory))
                    if threads:
                        return View(threads, source="faulthandler")
            finally:
                os.close(memory)
    return None


def _is_stopped(pid: int) -> bool:
    """Whether no thread of a process handles a signal: in state D the main thread alone handles none."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return stat.split()[0] in "TtZX"


def _written(memory: int) -> str:
    """Return the text that a process writes, once it is complete."""
    deadline, size = time.monotonic() + SIGNAL_S, 0
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.fstat(memory).st_size
        if now == size > 0:
            break
        size = now
    return os.pread(memory, size, 0).decode(errors="replace")


def _parsed(text: str) -> tuple[Thread, ...]:
    """Return the threads of a traceback of `faulthandler`, which has the main thread last."""
    parts = [part.splitlines() for part in _THREAD.split(text)[1:]]
    threads = []
    for index, lines in enumerate(parts):
        found = [match for line in lines if (match := _FRAME.match(line))]
        is_main = index == len(parts) - 1
        threads.append(
            {
                "name": "MainThread" if is_main else f"thread {index}",
                "main": is_main,
                "native_id": None,
                "exception": None,
                "frames": [{"name": each[3], "file": each[1], "line": int(each[2])} for each in found],
            }
        )
    return tuple(threads)


# The last position


def _last_seen(pid: int) -> View | None:
    for beacon in _beacons(pid):
        with suppress(OSError, ValueError, TypeError):
            at, place = json.loads(Path(f"/proc/{pid}/fd/{beacon.position}").read_text())
            ago_s = time.monotonic() - at
            if place:
                words = f"its main thread was at {place} when it was last seen, {ago_s:.1f} s ago"
                return View(position=words, source="its watch")
    return None
