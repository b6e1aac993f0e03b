"""Every example runs as two ranks under torchrun, and alone if it supports that, and prints that its check
held. The notebook runs cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.notebook import code_cells
from support.programs import ROOT, Ended, run, torchrun
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

APART = {"survive.py", "trace_for_hta.py"}
"""Examples that are no program of ranks, and have a test of their own."""

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


def test_a_trace_for_hta_has_a_kernel_for_each_outermost_call(tmp_path: Path) -> None:
    def call(name: str, category: str, at_us: float, took_us: float) -> dict[str, Any]:
        args = {"External id": 1}
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 4,
            "tid": 5,
            "ts": at_us,
            "dur": took_us,
            "args": args,
        }

    calls = [
        call("dist2:all_reduce", "user_annotation", 10.0, 50.0),
        call("aten::matmul", "cpu_op", 20.0, 10.0),
        call("aten::mm", "cpu_op", 21.0, 8.0),
        call("ProfilerStep#1", "user_annotation", 0.0, 99.0),
        {"ph": "M", "name": "process_name", "pid": 4, "tid": 5, "ts": 0.0, "args": {}},
    ]
    (tmp_path / "traces").mkdir()
    told = {"distributedInfo": {"rank": 1}, "traceEvents": calls}
    (tmp_path / "traces" / "rank1.json").write_text(json.dumps(told))
    example = ROOT / "examples" / "trace_for_hta.py"
    ended = run([*warm_python(), example, tmp_path / "traces", tmp_path / "copies"])
    assert ended.code == 0, ended
    copy = json.loads((tmp_path / "copies" / "rank1.json").read_text())
    assert (copy["distributedInfo"], copy["traceEvents"][:5]) == (told["distributedInfo"], calls)
    kernels = [each for each in copy["traceEvents"] if each.get("cat") == "kernel"]
    assert [(each["name"], each["ts"], each["dur"], each["args"]["stream"]) for each in kernels] == [
        ("ncclKernel_all_reduce", 10.0, 50.0, 20),
        ("aten::matmul", 20.0, 10.0, 7),
    ]
    launches = [each for each in copy["traceEvents"] if each.get("cat") == "cuda_runtime"]
    assert [(each["args"]["correlation"], each["ts"]) for each in launches] == [
        (each["args"]["correlation"], each["ts"]) for each in kernels
    ]


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
