"""Stacks of a process that cannot answer: it holds the interpreter lock, or is stopped."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.processes import started

import dist2
import observability
from dist2.rendezvous.liveness import Building
from observability.incidents.recording import Recording
from observability.incidents.waits import Waits
from observability.job import foreign_stacks, stacks
from observability.job.foreign_stacks import View, beacon_of, view_of
from observability.job.stacks import look_at_pid

SOON_S = 20.0


def wait(pipe: Connection, has_control_plane: bool) -> None:
    """Tell the pid, wait, and then hold the interpreter lock in C."""
    pg = dist2.new_group("socket", 60, store=dist2.HashStore(), rank=0, world_size=1)
    if has_control_plane:
        observability.start(pg, announce=False, waiting_after_s=0.3)
    else:
        Waits(Recording(Path("no folder")), 0.3).begin(Building(0, 1))
    pipe.send(os.getpid())
    pipe.recv()
    hold_the_lock()


def hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(600)


@pytest.fixture(params=[True, False], ids=["control plane", "looks for waits"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the pid of a process that holds the interpreter lock, and forget what was seen before."""
    monkeypatch.setattr(foreign_stacks, "FRESH_S", 0.0)
    with started(wait, (request.param,)) as (pipe,):
        pid = pipe.recv()
        until(lambda: foreign_stacks._last_seen(pid), "in wait")
        pipe.send("go")
        until(lambda: foreign_stacks._by_signal(pid), "hold_the_lock")
        yield pid


def until(look: Callable[[], View | None], text: str) -> View:
    """Return a view as soon as it has a text."""
    deadline = time.monotonic() + SOON_S
    while True:
        found = look()
        if found is not None and text in str(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def main_of(view: View) -> list[dict[str, Any]]:
    (frames,) = [each["frames"] for each in view.threads if each["main"]]
    return list(frames)


def test_a_process_is_seen_without_its_help(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_signal = foreign_stacks._by_signal(silent)
    assert by_signal is not None
    assert main_of(by_signal)[0]["name"] == "hold_the_lock"
    assert Path(main_of(by_signal)[0]["file"]) == Path(__file__)
    by_pyspy = foreign_stacks._by_pyspy(silent)
    if by_pyspy.threads:  # installed, and permitted by the kernel
        frames = [(each["name"], each["line"]) for each in main_of(by_pyspy)[:1]]
        assert frames == [(each["name"], each["line"]) for each in main_of(by_signal)[:1]]
    monkeypatch.setattr(foreign_stacks, "_by_pyspy", lambda pid: View())
    seen = look_at_pid(silent)
    assert seen.stands.endswith(" in hold_the_lock (by faulthandler)")
    assert seen.python == view_of(silent).threads

    os.kill(silent, signal.SIGSTOP)
    until_stopped(silent)
    stopped = look_at_pid(silent)
    assert stopped.words.endswith("stopped (by a signal): state T")
    assert "its main thread was at test_foreign_stacks.py:" in stopped.stands
    assert stopped.stands.endswith("ago (by its watch)")
    os.kill(silent, signal.SIGCONT)
    asleep = until(lambda: foreign_stacks._by_signal(silent), "hold_the_lock")
    assert asleep.source == "faulthandler", "the signals have not interrupted the call"


def many_threads(pipe: Connection) -> None:
    """Tell the pid and the name of the first stack of a process with more threads than are shown; wait."""
    for _ in range(stacks.MAX_THREADS + 20):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    found = stacks.stacks()
    foreign_stacks.memory.opened(threading.get_native_id())
    foreign_stacks.memory.note("job.py:7 in load")
    pipe.send((os.getpid(), len(found), [each["main"] for each in found].index(True)))
    pipe.recv()


def test_the_main_thread_is_told_of_a_process_with_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_stacks, "FRESH_S", 0.0)
    monkeypatch.setattr(foreign_stacks, "_by_pyspy", lambda pid: View())
    with started(many_threads, ()) as (pipe,):
        pid, count, main = pipe.recv()
        assert (count, main) == (stacks.MAX_THREADS, 0)
        seen = until(lambda: view_of(pid), "threading.py")
        assert not any(each["main"] for each in seen.threads), "it tells the latest 100 threads only"
        assert look_at_pid(pid).stands.startswith("its main thread was at job.py:7 in load when")
        pipe.send("end")


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + SOON_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_py_spy_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [{"name": "load", "filename": "/x/job.py", "line": 7}]
    thread = {"thread_name": None, "os_thread_id": 4711, "frames": frames}
    answers = [json.dumps([thread]), "[]", "no JSON", "[{}]"]

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["dump", "--pid", "4711", "--json", "--nonblocking"]
        return subprocess.CompletedProcess(command, 0, answers.pop(0), "")

    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    found = foreign_stacks._by_pyspy(4711)
    assert main_of(found) == [{"name": "load", "file": "/x/job.py", "line": 7}]
    assert found.threads[0]["name"] == "thread 4711"
    assert [foreign_stacks._by_pyspy(4711) for _ in range(3)] == [View()] * 3


def test_what_would_show_a_line_that_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a control plane, and no py-spy."""
    monkeypatch.setattr(foreign_stacks, "FRESH_S", 0.0)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with subprocess.Popen(["sleep", "600"]) as process:
        seen = look_at_pid(process.pid)
        monkeypatch.setattr(shutil, "which", lambda name, path=None: "/bin/false")
        refused = look_at_pid(process.pid)
        process.kill()
    assert (seen.stands, refused.stands) == ("", "")
    assert seen.unseen == "py-spy is not installed: pip install 'dist2[stacks]'"
    assert refused.unseen.startswith("py-spy failed")


@pytest.mark.parametrize(
    ("wchan", "words"),
    [("kernel_clone", "waiting for a child of vfork"), ("nfs_wait", "in a system call that cannot be")],
)
def test_a_process_that_waits_for_a_child_of_vfork_waits_for_no_disk(
    wchan: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = {"id": "7", "name": "python", "state": "D", "wchan": wchan}
    monkeypatch.setattr(stacks, "_tasks", lambda pid: (main,))
    told = stacks.kernel_view(7).words
    assert told.startswith(f"process 7 is {words}")
    assert told.endswith(f": state D, in {wchan}")


def test_the_last_thread_closes_the_memory() -> None:
    memory, pid = foreign_stacks._Memory(), os.getpid()
    before = beacon_of(pid)
    memory.note("job.py:6")
    memory.opened(1)
    memory.opened(2)
    first = beacon_of(pid)
    assert first is not None
    assert (first.thread, first.place) == (1, "job.py:6")
    memory.note("job.py:7" * 1000)
    memory.closed(1)
    second = beacon_of(pid)
    assert second is not None
    assert (second.number, second.stacks, second.thread) == (first.number, first.stacks, 2)
    assert second.place.startswith("job.py:7")
    memory.closed(2)
    memory.closed(2)
    memory.note("job.py:8")
    assert beacon_of(pid) == before


LOOKED_AT_WHILE_IT_CLOSES = """
import ctypes, os, threading
from observability.job.foreign_stacks import beacon_of, memory

for _ in range(2):
    memory.opened(threading.get_native_id())
    beacon = beacon_of(os.getpid())
    memory.closed(threading.get_native_id())
    assert beacon_of(os.getpid()) is None
    assert ctypes.CDLL(None).tgkill(os.getpid(), beacon.thread, beacon.number) == 0
"""


def test_a_look_at_a_process_that_closes_its_control_plane_does_not_end_it() -> None:
    """The neighbour has read the signal before, and the thread lives on."""
    command = [sys.executable, "-c", LOOKED_AT_WHILE_IT_CLOSES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S * 3, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_signal_that_c_code_handles_is_not_taken() -> None:
    number = next(foreign_stacks._free_signals())
    libc = ctypes.CDLL(None)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(number, ctypes.cast(handler, ctypes.c_void_p))
    try:
        assert next(foreign_stacks._free_signals()) < number
    finally:
        libc.signal(number, None)
    assert next(foreign_stacks._free_signals()) == number
