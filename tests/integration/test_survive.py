"""A training job loses a rank, goes on, gets it back, and ends where it would have ended."""

from __future__ import annotations

import re

import pytest
from support.programs import ROOT, processes_with, run
from support.warm_interpreter import warm_python

EXAMPLE = ROOT / "examples" / "survive.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_training_job_survives_a_death() -> None:
    ended = run([*warm_python(), EXAMPLE, "--seed=1", "--steps=120"], timeout_s=100)
    assert ended.code == 0, ended
    said = ended.output
    assert "rank 1 died" in said, ended
    assert re.search(r"3 ranks continue, \d+ ms after the death", said), ended
    assert "4 ranks again" in said, ended
    assert re.search(r"^ok: rank 1 died at step \d+ and was replaced", said, re.MULTILINE), ended
    assert not processes_with(str(EXAMPLE))
