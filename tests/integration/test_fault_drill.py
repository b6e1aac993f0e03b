"""Operation x phase x fault x transport: no cell hangs, ends a rank that should live, or keeps anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill.cells import FAULT_CELLS, STORY_CELLS, Cell, FaultCell, Performance, StoryCell
from drill.crew import Crew
from support.programs import ROOT, run
from support.time_limits import failure

LIMIT_S = 40.0


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(tmp_path_factory.mktemp("crew"))
    yield crew
    crew.end()


def play(crew: Crew, cell: Cell, transport: str, path: Path) -> None:
    """Run a cell; fail with the reports of each rank unless all went as expected."""
    told = crew.run(Performance(cell, transport, path / "store"), cell.roles, LIMIT_S)
    wrong = [
        role for role, each in enumerate(told) if each.outcome != ("died" if role in cell.dies else "done")
    ]
    account = "\n".join(f"rank {role}: {each}" for role, each in enumerate(told))
    if wrong:
        about = f"{cell} over {transport}: not as it should on rank(s) {wrong}\n{account}"
        raise failure(about, *[told[role].verdict for role in wrong])


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("cell", FAULT_CELLS, ids=str)
def test_a_fault_in_an_operation(crew: Crew, cell: FaultCell, transport: str, tmp_path: Path) -> None:
    play(crew, cell, transport, tmp_path)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("cell", STORY_CELLS, ids=str)
def test_a_change_of_members(crew: Crew, cell: StoryCell, transport: str, tmp_path: Path) -> None:
    play(crew, cell, transport, tmp_path)


def test_the_program_for_all_cells() -> None:
    """Without pytest: its paths and environment are not those of a user."""
    program = ["env", "-u", "DIST2_INCIDENTS", sys.executable, "-m", "drill"]
    arguments = ["--ranks", "2", "--transports", "shm", "--operations", "barrier"]
    ended = run([*program, *arguments], timeout_s=50, variables={"PYTHONPATH": f"{ROOT}/tests"})
    assert ended.code == 0, ended
    assert "3 cells, 0 failures" in ended.output, ended
