"""Worker processes that a rank waits for, in the verdict."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from support.programs import run
from support.warm_interpreter import warm_python

PROGRAM = """
import multiprocessing, os, signal, threading, time
from observability.job import foreign_stacks, workers

foreign_stacks.FRESH_S = 0.0

def read_shard(pid_to, data):
    os.write(pid_to, str(os.getpid()).encode())
    os.read(data, 1)  # line 9

def look(main, pid_from):
    pid = int(os.read(pid_from, 20))
    try:
        for text in EXPECTED:
            deadline, told = time.monotonic() + 20, ""
            while text not in told:
                assert time.monotonic() < deadline, told
                told = workers.Workers().told(main)
            print(told.replace(str(pid), "PID"))
            os.kill(pid, signal.SIGSTOP)
        assert not workers.told_workers(threading.get_ident()), "this thread waits for no worker"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.write(ended, b"x")

if __name__ == "__main__":
    (pid_from, pid_to), (data, _), (end, ended) = os.pipe(), os.pipe(), os.pipe()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        result = pool.apply_async(read_shard, (pid_to, data))
        threading.Thread(target=look, args=(threading.main_thread().ident, pid_from)).start()
        while not multiprocessing.connection.wait([end], 0):
            result.wait(0.5)
"""


def test_the_line_of_a_worker_is_told_and_idle_ones_are_not(tmp_path: Path) -> None:
    """The main thread waits for a pool of two, of which one waits for a task."""
    has_pyspy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    expected = [*(["read_shard"] if has_pyspy else []), "stopped"]
    script = tmp_path / "loader.py"
    script.write_text(PROGRAM.replace("EXPECTED", repr(expected)))
    ended = run([*warm_python(), script])
    assert ended.code == 0, ended
    *lines, stopped = ended.output.splitlines()
    assert stopped == "its worker process PID (process PID is stopped (by a signal): state T)"
    assert lines == ["its worker process PID is at loader.py:9 in read_shard (by py-spy)"][: len(lines)]
    assert len(lines) == len(expected) - 1
