"""Python stacks of a process of this host that cannot answer: stopped, or with the interpreter lock held.

Theory of operation. Three sources, the best first. py-spy, where it is installed (extra ``stacks``) and the
kernel permits it, reads the memory of the process. A signal makes a process write its stacks (`faulthandler`,
which needs no interpreter lock) into memory that others can open; it is sent to the thread of its control
plane or to that which looks for waits, so that no call of the program is interrupted. A process that is
stopped handles no signal: of it the position of its main thread remains, which these threads write now and
then.

Memory is a memfd, found by its name and opened in ``/proc/PID/fd``: the kernel lets only the same user do
that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import json
import logging
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

from dist2.runtime.process import InChild, in_child

PYSPY_S = 5.0
SIGNAL_S = 0.5
"""How long a process may take to write its stacks."""
FRESH_S = 3.0
"""A view that is no older is given again: pages ask once a second."""
STACKS, ABOUT = "dist2-stacks", "dist2-about"
"""Names of the memory of a process."""
ABOUT_BYTES = 4096
PLACE_CHARS = 600
INSTALL = "pip install 'dist2[stacks]'"
MAX_FRAMES = 64
_THREAD = re.compile(r"(?m)^(?:Thread|Current thread) 0x[0-9a-f]+.*$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

log = logging.getLogger("dist2.incidents")

Thread = dict[str, Any]
"""A thread as in the answer of ``/stacks``."""


@attrs.frozen
class View:
    """What of a process can be seen from outside.

    Attributes:
        threads: Its Python threads; empty if they cannot be read.
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
    """What a process of this host tells others, so that they find its stacks.

    Attributes:
        stacks: The memory that it writes them to.
        number: The signal that makes it do so.
        thread: The kernel's id of the thread that the signal is sent to.
        at_s: When it was at `place`, in seconds of the monotonic clock.
        place: The position of its main thread; empty if unknown.
    """

    stacks: Path
    number: int
    thread: int
    at_s: float
    place: str


class _Memory:
    """The memory of this process that its neighbours read, shared by its threads that observe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[int] = []
        self._number = self._stacks = self._about = self._nowhere = -1
        self._at_s, self._place = 0.0, ""

    def opened(self, thread: int) -> None:
        """Have others find the stacks by a signal to a thread, unless no signal is free."""
        with self._lock:
            if self._threads or self._open():
                self._threads.append(thread)
                self._tell()

    def closed(self, thread: int) -> None:
        """Send no more signals to a thread, which ends; the last one closes the memory. Idempotent."""
        with self._lock:
            if thread not in self._threads:
                return
            self._threads.remove(thread)
            if self._threads:
                self._tell()
                return
            # A neighbour may have read of the signal before: without a handler it would end this process.
            faulthandler.register(self._number, self._nowhere, chain=False)
            os.close(self._stacks)
            os.close(self._about)
            self._stacks = self._about = -1

    def note(self, place: str) -> None:
        """Write the position of the main thread."""
        with self._lock:
            self._at_s, self._place = time.monotonic(), place
            if self._threads:
                self._tell()

    def forget(self) -> None:
        """Let go of the memory of the parent, in a forked child."""
        self._lock = threading.Lock()
        for thread in [*self._threads]:
            self.closed(thread)
        self._at_s, self._place = 0.0, ""

    def _tell(self) -> None:
        told = [self._number, self._threads[0], self._at_s, self._place[:PLACE_CHARS]]
        os.pwrite(self._about, json.dumps(told).encode().ljust(ABOUT_BYTES), 0)

    def _open(self) -> bool:
        try:
            if self._number < 0:
                self._number = next(_free_signals(), -1)
            if self._number < 0:
                return False
            if self._nowhere < 0:
                self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            self._stacks = os.memfd_create(STACKS, os.MFD_CLOEXEC)
            try:
                self._about = os.memfd_create(ABOUT, os.MFD_CLOEXEC)
            except OSError:
                os.close(self._stacks)
                raise
        except OSError as error:  # such as a lack of descriptors: the rest works without
            log.info("other processes will not see where this one stands: %s", error)
            return False
        fcntl.fcntl(self._stacks, fcntl.F_SETFL, os.O_APPEND)  # readers cut it off
        faulthandler.register(self._number, self._stacks, all_threads=True, chain=False)
        return True


memory = _Memory()


def _free_signals() -> Iterator[int]:
    """Yield signals for real time that this process neither handles nor ignores, in Python or in C."""
    status = Path("/proc/self/status").read_text()
    taken = [int(found[1], 16) for found in re.finditer(r"(?m)^Sig(?:Ign|Cgt):\s*([0-9a-f]+)$", status)]
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if not any(mask >> (number - 1) & 1 for mask in taken):
            yield number


in_child(InChild.STACKS)(memory.forget)


_views: dict[int, tuple[float, View]] = {}


def view_of(pid: int) -> View:
    """Return what of another process of this host can be seen."""
    known = _views.get(pid)
    if known is not None and time.monotonic() - known[0] < FRESH_S:
        return known[1]
    found = by_pyspy = _by_pyspy(pid)
    if not by_pyspy.threads:
        by_signal, last = _by_signal(pid), _last_seen(pid)
        found = by_signal or last or by_pyspy
        if by_signal is not None and last is not None and not any(each["main"] for each in by_signal.threads):
            found = attrs.evolve(last, threads=by_signal.threads)
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


def beacon_of(pid: int) -> Beacon | None:
    """Return what a process tells others; None if it tells nothing, or belongs to another user."""
    found: dict[str, Path] = {}
    with suppress(OSError, ValueError, TypeError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                found[str(path.readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")] = path
        if STACKS in found and ABOUT in found:
            number, thread, at_s, place = json.loads(found[ABOUT].read_text())
            return Beacon(found[STACKS], int(number), int(thread), float(at_s), str(place))
    return None


def _by_signal(pid: int) -> View | None:
    tgkill, beacon = getattr(ctypes.CDLL(None), "tgkill", None), beacon_of(pid)
    with suppress(OSError):
        if beacon is None or tgkill is None or _is_stopped(pid):
            return None
        memory = os.open(beacon.stacks, os.O_RDWR | os.O_CLOEXEC)
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
    """Return the threads of a traceback of `faulthandler`.

    It has the main thread last, and of more than 100 threads the latest 100 only: then the main thread is not
    among them.
    """
    parts = [part.splitlines() for part in _THREAD.split(text)[1:]]
    is_cut = text.endswith("\n...\n")
    threads = []
    for index, lines in enumerate(parts):
        found = [match for line in lines if (match := _FRAME.match(line))]
        is_main = index == len(parts) - 1 and not is_cut
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
    beacon = beacon_of(pid)
    if beacon is None or not beacon.place:
        return None
    ago_s = time.monotonic() - beacon.at_s
    words = f"its main thread was at {beacon.place} when it was last seen, {ago_s:.1f} s ago"
    return View(position=words, source="its watch")
