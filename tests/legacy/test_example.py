"""A program written for torch.distributed runs under torchrun with one import changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torchrun
def test_drop_in_under_torchrun() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "examples/legacy_drop_in.py"], cwd=ROOT, capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stderr
    assert "ok: 2 ranks, backend 'socket'" in done.stdout
