"""The commands that ask a job start without torch, whose import takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.time_limits import in_time

from observability.incidents import folders

PROGRAM = """
import sys, time
from dist2.cli import main
try:
    main()
finally:
    loaded = {name.partition(".")[0] for name in sys.modules}
    print(sorted(loaded & {"torch", "numpy", "starlette", "uvicorn"}), time.process_time(), file=sys.stderr)
"""
WITHIN_S = 0.6  # 0.3 s on an idle machine; with torch it takes 3 s


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    found = {"verdict": ["rank 1 is stuck"], "culprits": [1], "waiting": [], "chains": [], "took_s": 0.1}
    rows = [{"rank": 1, "threads": None, "silence": "it is gone", "process": None}]
    (tmp_path / folders.HEAD).write_text(json.dumps({"format": folders.FORMAT}))
    (tmp_path / "desync.json").write_text(json.dumps(found))
    (tmp_path / "stacks.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ps"], 0, "No running job of this user"),
        (["why", "INCIDENT"], 1, "rank 1 is stuck"),
        (["top", "http://127.0.0.1:1"], 2, "does not answer"),
    ],
)
def test_a_command_starts_without_torch(
    arguments: list[str], code: int, words: str, incident: Path, tmp_path: Path
) -> None:
    arguments = [str(incident) if each == "INCIDENT" else each for each in arguments]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
        },  # where the control planes of this user leave their files
        capture_output=True,
        text=True,
        timeout=50,
    )
    *told, last = ended.stderr.splitlines()
    assert ended.returncode == code, ended
    assert words in ended.stdout + "\n".join(told)
    loaded, cpu_s = last.rsplit(maxsplit=1)
    assert loaded == "[]"
    in_time(float(cpu_s), WITHIN_S)


def test_each_name_of_dist2_is_there_at_its_first_use() -> None:
    program = """
import sys, dist2
assert "torch" not in sys.modules
assert not hasattr(dist2, "_private") and "torch" not in sys.modules
assert issubclass(dist2.errors.WireError, dist2.Dist2Error) and dist2.ReduceOp.SUM
from dist2 import *
assert new_group is dist2.new_group and PeerLostError.__module__ == "dist2.errors"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
