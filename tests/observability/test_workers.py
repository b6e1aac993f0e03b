"""Worker processes that a rank waits for, in the verdict."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.programs import run
from support.warm_interpreter import warm_python

from observability.job import foreign_stacks, workers

PROGRAM = """
import multiprocessing, os, signal, sys, threading, time

def read_shard(folder):
    open(f"{folder}/pid", "w").write(str(os.getpid()))
    open(f"{folder}/data").read()  # line 6

def look(main, folder):
    pid = int(open(f"{folder}/pid").read())
    try:
        for text in EXPECTED:
            deadline, told = time.monotonic() + 20, ""
            while text not in told or ";" in told:  # the other worker may still start
                assert time.monotonic() < deadline, told
                told = workers.Workers().told(main)
            print(told.replace(str(pid), "PID"))
            os.kill(pid, signal.SIGSTOP)
        assert not workers.told_workers(threading.get_ident()), "this thread waits for no worker"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.write(ended, b"x")

if __name__ == "__main__":
    from observability.job import foreign_stacks, workers  # which started workers need not import

    foreign_stacks.FRESH_S = 0.0
    method, folder = sys.argv[1:]
    for name in ("pid", "data"):
        os.mkfifo(f"{folder}/{name}")
    end, ended = os.pipe()
    with multiprocessing.get_context(method).Pool(2) as pool:
        result = pool.apply_async(read_shard, (folder,))
        threading.Thread(target=look, args=(threading.main_thread().ident, folder)).start()
        while not multiprocessing.connection.wait([end], 0):
            result.wait(0.5)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_line_of_a_worker_is_told_and_idle_ones_are_not(method: str, tmp_path: Path) -> None:
    """The main thread waits for a pool of two, of which one waits for a task."""
    has_pyspy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    expected = ["read_shard" if has_pyspy else "it waits for a worker process (", "stopped"]
    script = tmp_path / "loader.py"
    script.write_text(PROGRAM.replace("EXPECTED", repr(expected)))
    ended = run([*warm_python(), script, method, tmp_path])
    assert ended.code == 0, ended
    line, stopped = ended.output.splitlines()
    assert stopped == "its worker process PID (process PID is stopped (by a signal): state T)"
    if has_pyspy:
        assert line == "its worker process PID is at loader.py:6 in read_shard (by py-spy)"


def test_a_worker_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_stacks, "pyspy", lambda *_: ("", "py-spy is not installed"))
    monkeypatch.setattr(workers, "_waits", lambda thread_id: True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        monkeypatch.setattr(workers, "worker_processes", lambda: iter([worker.pid]))
        told = workers.told_workers(threading.get_ident())
        words = f"it waits for a worker process ({worker.pid}), whose line needs py-spy"
        assert told == f"{words}: {foreign_stacks.INSTALL}"
        worker.communicate(b"\n")
