"""A training job loses a rank, goes on, gets it back, and ends where it would have ended."""

from __future__ import annotations

import re
import sys

import pytest
from launching import ROOT, processes_with, run

EXAMPLE = ROOT / "examples" / "survive.py"


@pytest.mark.slow
@pytest.mark.alone
def test_a_training_job_survives_a_death() -> None:
    ended = run([sys.executable, EXAMPLE, "--seed=1", "--steps=120"])
    assert ended.code == 0, ended
    said = ended.output
    assert "rank 1 died" in said, ended
    assert re.search(r"3 ranks go on, \d+ ms after the death", said), ended
    assert "4 ranks again" in said, ended
    assert re.search(r"^ok: rank 1 died at step \d+ and came back", said, re.MULTILINE), ended
    assert not processes_with(str(EXAMPLE))
