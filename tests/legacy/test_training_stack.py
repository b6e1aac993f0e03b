"""torch's training stack after the changed import line alone: `training_stack`, in two processes."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from legacy.training_stack import PARTS, run_all
from support.processes import answers_of, started
from support.training import WORLD


def _rank(pipe: Connection, rank: int, folder: Path) -> None:
    pipe.send(run_all(rank, folder))


@pytest.mark.timeout(60)
def test_what_looks_up_torchs_default_group_finds_it(tmp_path: Path) -> None:
    with started(_rank, *[(rank, tmp_path) for rank in range(WORLD)]) as pipes:
        assert answers_of(pipes) == [[part.__name__ for part in PARTS]] * WORLD
