"""`dist2.launch.local` as newcomers call it: in a program without a guard of ``__main__``."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.programs import start
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

from dist2 import InvalidUsageError, PeerLostError, RanksFailedError, launch
from dist2.errors import ResourceError
from dist2.launch.meeting import rank_environment

CALLS = """
import enum, linecache, os, threading, time
import torch, dist2

@dist2.register_type
class Color(enum.Enum):
    RED = 1

def total(x):
    with dist2.new_group("socket", timeout=30) as pg:
        tensor = torch.full((1,), x + pg.rank())
        pg.all_reduce(tensor)
        print("half done", end="\\r")
        print("rank", pg.rank(), "has", tensor.item())
        assert pg.all_gather_object(Color.RED) == [Color.RED] * 2
    try:
        pg.barrier()
    except dist2.GroupAbortedError as error:
        assert "was shut down" in str(error), error
    return tensor

print(dist2.launch.local(total, 2, 10.0))

lines = [
    "def fails():\\n",
    "    if os.environ['RANK'] == '1':\\n",
    "        raise KeyError('so')\\n",
    "    os._exit(3)\\n",
]
linecache.cache["<cell>"] = 0, None, lines, "<cell>"  # as a notebook does
exec(compile("".join(lines), "<cell>", "exec"))
try:
    dist2.launch.local(fails, 2)
except dist2.RanksFailedError as error:
    print([f"{rank}: {error.errors[rank]!r}" for rank in (0, 1)], error.__cause__ in error.errors.values())
    shown = 'File "<cell>", line 3, in fails\\n    raise KeyError' in str(error)
    print(shown, "rank 0: RuntimeError: the p" in str(error), threading.active_count())
try:
    dist2.launch.local(time.sleep, 2, 100, timeout=0.1)
except dist2.RanksFailedError as error:
    print(str(error).splitlines()[0])
"""
STAYS = """
import os, subprocess, sys, time
import dist2

def stays():
    child = subprocess.Popen(["sleep", "100"])
    print("pids", os.getpid(), child.pid, repr(sys.stdin.read()), flush=True)
    time.sleep(100)

dist2.launch.local(stays, 1)
"""


def ended_after(number: signal.Signals, *command: str | Path) -> tuple[list[str], list[bool], str]:
    """Run a program that ends in `STAYS`, and send it a signal there.

    Returns:
        The lines before; whether the rank and the process that it had started ended; and the errors.
    """
    process = start(command, DIST2_INCIDENTS="0")
    assert process.stdout is not None
    killer = threading.Timer(45, process.kill)
    killer.start()
    try:
        lines: list[str] = []
        while (line := process.stdout.readline()) and not line.startswith("[0] pids"):
            lines.append(line.rstrip())
        assert line.endswith(" ''\n"), f"{line}{process.stderr.read()}"
        ends = [os.pidfd_open(int(pid)) for pid in line.split()[2:4]]
        process.send_signal(number)
        _, errors = process.communicate()
    finally:
        killer.cancel()
        killer.join()
        process.kill()
    ended = []
    for end, limit_s in zip(ends, (10, 10 if number == signal.SIGINT else 0), strict=True):
        ended.append(bool(select.select([end], [], [], limit_s)[0]))
    for end in ends:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)
    return lines, ended, errors


def test_a_program_calls_functions_on_ranks_and_is_killed() -> None:
    warm_executable()
    lines, ended, _ = ended_after(signal.SIGKILL, *warm_python(), CHILDREN, "-c", CALLS + STAYS)
    assert ended[0]
    assert sorted(lines[:4]) == [
        "[0] half done",
        "[0] rank 0 has 21.0",
        "[1] half done",
        "[1] rank 1 has 21.0",
    ]
    assert lines[4:] == [
        "[tensor([21.]), tensor([21.])]",
        "[\"0: RuntimeError('the process exited with code 3')\", \"1: KeyError('so')\"] True",
        "True True 1",
        "ranks 0, 1 failed",
    ]


def test_the_rank_that_an_error_blames_by_its_cause_comes_first(tmp_path: Path) -> None:
    def fails() -> None:
        pid = tmp_path / "pid"
        if os.environ["RANK"] == "0":
            (tmp_path / "new").write_text(str(os.getpid()))
            (tmp_path / "new").rename(pid)
            raise RuntimeError("the step failed") from PeerLostError("rank 1 aborted the group", ranks=(1,))
        while not pid.exists():
            time.sleep(0.01)
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(int(pid.read_text()))], [], [])
        raise ValueError("no data in shard 7")

    with pytest.raises(RanksFailedError, match=r"^ranks 0, 1 failed, rank 1 as the cause\n") as failure:
        launch.local(fails, 2)
    assert isinstance(failure.value.__cause__, ValueError)


def test_ctrl_c_ends_ranks_and_the_processes_that_they_started() -> None:
    _, ended, errors = ended_after(signal.SIGINT, *warm_python(), "-c", STAYS)
    assert ended == [True, True]
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (0, -1, "2"):
        with pytest.raises(InvalidUsageError, match=f"ranks must be a positive integer, got {ranks!r}"):
            launch.local(print, ranks)
    with pytest.raises(InvalidUsageError, match="fn must be callable, got 3"):
        launch.local(3, 1)
    with pytest.raises(InvalidUsageError, match=r"coroutine function sleep, .* calls asyncio\.run\(sleep"):
        launch.local(asyncio.sleep, 1, 0)
    with pytest.raises(InvalidUsageError, match="must be picklable"):
        launch.local(print, 1, threading.Lock())
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(InvalidUsageError, match=r"pip install 'dist2\[launch\]'"):
        launch.local(lambda: None, 1)


def test_no_session_is_ended_whose_number_may_be_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that has ended, and whose end was asked for, another process may have the number."""
    held, killpg = [], os.killpg

    def noted(number: int, how: int) -> None:
        held.append(Path(f"/proc/{number}").exists())
        killpg(number, how)

    monkeypatch.setattr(os, "killpg", noted)
    assert launch.local(int, 2, 7) == [7, 7]
    assert held == [True, True]


def test_a_caller_without_a_free_descriptor_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(ResourceError, match=r"a start of a rank failed: .*EMFILE.*ulimit -n"):
        launch.local(int, 2, 7)


def test_ranks_share_the_cores_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = [rank_environment(0, count, 1)["OMP_NUM_THREADS"] for count in (1, 3, 16)]
    assert threads == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert rank_environment(0, 3, 1)["OMP_NUM_THREADS"] == "5"
