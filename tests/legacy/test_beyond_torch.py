"""Cases in which dist2's global API does more than torch's, or differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from legacy import beyond
from legacy.pool import RankPool

CASES = [
    beyond.uneven_sizes,
    beyond.reduce_leaves_others_alone,
    beyond.inside_a_block,
    beyond.outside_a_group,
    beyond.wrong_arguments,
    beyond.groups_with_a_backend_of_their_own,
    beyond.split_and_shrink,
    beyond.coalescing,
    beyond.objects_from_any_rank,
    beyond.pickles_behind_a_switch,
    beyond.ranks_and_sizes_in_tensors,
    beyond.a_future_of_tensors,
    beyond.complex_beside_real,
    beyond.timeouts,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_all_ranks(job: RankPool, case: Callable[[int], None]) -> None:
    job.run(case)


def test_names_are_agreed_on_by_ranks_outside_too(job: RankPool) -> None:
    assert len(set(job.run(beyond.names_are_agreed_on))) == 1


def test_begin_again(job: RankPool, backend: str, tmp_path: Path) -> None:
    job.run(beyond.init_again, backend, str(tmp_path))


def test_alone(ranks: RankPool) -> None:
    ranks.run(beyond.alone)


def test_meshes_after_a_shrink(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(beyond.meshes_after_a_shrink, str(tmp_path / "store"))
