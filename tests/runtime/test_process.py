"""The exit of a process and its forks: all steps run in order, also if one of them raises."""

from __future__ import annotations

import subprocess
import sys

from support.warm_interpreter import whole_python

PROGRAM = """
import os, threading
import dist2.group  # its modules have steps of their own
from dist2.runtime import process
from dist2.runtime.process import AtExit, InChild, at_exit, in_child

@at_exit(AtExit.STORES)
def stores():
    print("stores", flush=True)

@at_exit(AtExit.GROUPS)
def groups():
    print("groups", flush=True)
    raise OSError("of the step")

@in_child(InChild.GROUPS)
def child_groups():
    print("child's groups", flush=True)

@in_child(InChild.STORES)
def child_stores():
    print("child's stores", flush=True)
    raise OSError("of the child's step")

if not os.fork():
    os._exit(0)
os.wait()
"""


def test_every_step_runs_in_order_though_one_raises() -> None:
    ended = subprocess.run(
        [*whole_python(), "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.splitlines() == ["child's stores", "child's groups", "groups", "stores"]
    assert "OSError: of the step" in ended.stderr
    assert "OSError: of the child's step" in ended.stderr


def test_a_lack_of_memory_at_exit_prints_nothing() -> None:
    program = PROGRAM.replace('OSError("of the step")', "MemoryError")
    ended = subprocess.run(
        [*whole_python(), "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.splitlines()[-2:] == ["groups", "stores"]
    assert "Error" not in ended.stderr.replace("OSError: of the child's step", "")
    assert ended.returncode == 0


def test_a_fork_before_the_library_is_loaded_prints_nothing() -> None:
    program = "import os, dist2\nif not os.fork():\n    os._exit(0)\nos.wait()\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
