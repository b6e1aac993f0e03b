"""`dist2.launch.local` as newcomers call it: in a program without a guard of ``__main__``, from stdin."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest
from support.programs import ROOT, environment, processes_with

from dist2 import InvalidUsageError, launch

CALLS = """
import os, subprocess, sys, time
import torch, dist2

def total(x):
    with dist2.new_group("socket", timeout=30) as pg:
        tensor = torch.full((1,), x + pg.rank())
        pg.all_reduce(tensor)
        print("rank", pg.rank(), "has", tensor.item())
        return tensor

print(dist2.launch.local(total, 2, 10.0))

def fails():
    if os.environ["RANK"] == "1":
        raise KeyError("so")
    subprocess.Popen(["sleep", "987654"])
    os._exit(3)

try:
    dist2.launch.local(fails, 2)
except dist2.RanksFailedError as error:
    print([f"{rank}: {error.errors[rank]!r}" for rank in (0, 1)], error.__cause__ in error.errors.values())
    print('File "<stdin>", line 16, in fails' in str(error), "rank 0: RuntimeError: the p" in str(error))
"""
STAYS = """
import os, time
import dist2

dist2.launch.local(lambda: print("pid", os.getpid()) or time.sleep(100), 1)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_program_calls_a_function_on_ranks(number: signal.Signals) -> None:
    """In the end the program is interrupted, or killed: then no rank is left."""
    process = subprocess.Popen(
        [sys.executable, "-"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    killer = threading.Timer(140, process.kill)
    killer.start()
    try:
        process.stdin.write(f"{CALLS if number == signal.SIGINT else ''}{STAYS}")
        process.stdin.close()
        process.stdin = None
        lines: list[str] = []
        while line := process.stdout.readline():
            if line.startswith("[0] pid"):
                break
            lines.append(line.rstrip())
        end = os.pidfd_open(int(line.split()[-1]))
        process.send_signal(number)
        _, errors = process.communicate()
        ended = select.select([end], [], [], 20)[0]
        os.close(end)
    finally:
        killer.cancel()
        killer.join()
        process.kill()
    assert ended
    assert not processes_with("dist2.launch.worker")
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert sorted(lines[:2]) == ["[0] rank 0 has 21.0", "[1] rank 1 has 21.0"]
        assert lines[2:] == [
            "[tensor([21.]), tensor([21.])]",
            "[\"0: RuntimeError('the process exited with code 3')\", \"1: KeyError('so')\"] True",
            "True True",
        ]
        assert not processes_with("987654"), "a process that a rank has started"


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (0, -1, "2"):
        with pytest.raises(InvalidUsageError, match=f"ranks must be a positive integer, got {ranks!r}"):
            launch.local(print, ranks)
    with pytest.raises(InvalidUsageError, match="fn must be callable, got 3"):
        launch.local(3, 1)
    with pytest.raises(InvalidUsageError, match="must be picklable"):
        launch.local(print, 1, threading.Lock())
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(InvalidUsageError, match=r"pip install 'dist2\[launch\]'"):
        launch.local(lambda: None, 1)
