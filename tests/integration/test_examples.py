"""Every example runs as two ranks under torchrun, and alone if it supports that, and prints that its check
held. The notebook runs cell by cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.notebook import code_cells
from support.programs import ROOT, Ended, run, torchrun
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

APART = {"survive.py"}
"""Examples that start their own ranks, and have a test of their own."""

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in APART)
ALONE = [path for path in EXAMPLES if f"python examples/{path.name}" in path.read_text()]


def ok_lines(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if line.startswith("ok")]


def test_there_are_examples() -> None:
    assert {"objects.py", "split_and_context.py"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("example", ALONE, ids=lambda path: path.name)
def test_alone(example: Path) -> None:
    ended = run([*warm_python(), example])
    assert ended.code == 0, ended
    assert ok_lines(ended), ended


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_two_ranks(example: Path, tmp_path: Path) -> None:
    ended = torchrun(example, 2, folder=tmp_path)
    assert ended.code == 0, ended
    assert example.name != "legacy_drop_in.py" or "ok: 2 ranks, backend 'socket'" in ended.output
    assert ok_lines(ended), ended


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_tutorial_prints_what_it_shows() -> None:
    notebook, program = ROOT / "examples" / "tutorial.ipynb", ROOT / "tests" / "support" / "notebook.py"
    warm_executable()
    ended = run(
        [*warm_python(), CHILDREN, program, notebook], timeout_s=120.0, variables={"DIST2_INCIDENTS": "0"}
    )
    assert ended.code == 0, ended
    printed = [json.loads(line) for line in ended.output.splitlines()]
    shown = [output for _, output in code_cells(notebook)]
    assert all(shown)
    assert printed == shown
