"""Training programs for torch run on dist2 as they do on Gloo."""

from __future__ import annotations

import json
import sys

import pytest
from support.programs import ROOT, run
from support.torch_features import has

APART = ["job.py"] if has("pipelines") else ["job.py", "pipeline.py"]  # which fails on both backends then
PROGRAMS = sorted(path for path in (ROOT / "examples" / "training").glob("*.py") if path.name not in APART)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_programs_on_both_backends() -> None:
    """All in one process tree: importing torch takes longer than any of them."""
    command = [sys.executable, "-m", "support.forked_programs", *PROGRAMS]
    ended = run(command, timeout_s=110, variables={"PYTHONPATH": f"{ROOT}/tests:{ROOT}"})
    assert ended.code == 0, ended
    found = json.loads(ended.output)
    assert len(found) == 2 * len(PROGRAMS)
    assert len(PROGRAMS) + len(APART) >= 7
    for name, (codes, told, took_s) in found.items():
        print(f"{name}: {took_s:.1f} s")
        assert codes == [0, 0], f"{name}: {codes}\n{told}"
        assert [line for line in told.splitlines() if line.startswith("ok ")], told
