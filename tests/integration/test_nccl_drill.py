"""The fault drill over NCCL on host memory, with real processes; the stub hangs where NCCL would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from drill.cells import FAULT_CELLS, STORY_CELLS, Cell, FaultCell, Performance
from drill.crew import Crew
from support import nccl_stubs
from support.time_limits import failure

pytestmark = [
    pytest.mark.skipif(bool(nccl_stubs.missing()), reason=str(nccl_stubs.missing())),
]

LIMIT_S = 40.0


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    nccl_stubs.path()  # built once, before several processes want it
    crew = Crew(tmp_path_factory.mktemp("crew"))
    yield crew
    crew.end()
    nccl_stubs.sweep()


def play(crew: Crew, cell: Cell, path: Path) -> None:
    """Run a cell; fail with the reports of each rank unless all went as expected."""
    told = crew.run(Performance(cell, "nccl", path / "store"), cell.roles, LIMIT_S)
    wrong = [
        role for role, each in enumerate(told) if each.outcome != ("died" if role in cell.dies else "done")
    ]
    account = "\n".join(f"rank {role}: {each}" for role, each in enumerate(told))
    if wrong:
        about = f"{cell}: not as it should on rank(s) {wrong}\n{account}"
        raise failure(about, *[told[role].verdict for role in wrong])


SWEPT = [
    pytest.param(cell, marks=pytest.mark.exhaustive) if cell.roles > 2 else pytest.param(cell)
    for cell in FAULT_CELLS
]
"""Cells of more than two ranks are for `make test-all`."""


@pytest.mark.parametrize("cell", SWEPT, ids=str)
def test_a_fault_in_an_operation(crew: Crew, cell: FaultCell, tmp_path: Path) -> None:
    play(crew, cell, tmp_path)


@pytest.mark.parametrize("cell", STORY_CELLS, ids=str)
def test_a_change_of_members(crew: Crew, cell: Cell, tmp_path: Path) -> None:
    play(crew, cell, tmp_path)
