"""Tuning files: reading returns the written values, invalid ones are refused by name, and rank 0's file is
used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.ranks import TENANTS, run_ranks

import dist2
from dist2 import HashStore, InvalidUsageError, ProcessGroup
from dist2.backends.socket.tuning import CROWDS, DEFAULT_THRESHOLDS, MAPPED, Thresholds, Tuning, column
from dist2.runtime.config import Config

INPROC = TENANTS[0]


def test_a_file_is_read_back(tmp_path: Path) -> None:
    limits = Thresholds(whole_bytes=7, crowd=3, gather_mapped_bytes=(1, 2, 3, 4))
    tuning = Tuning(limits, {"machine": "a fast one", "rounds": [1, 2]})
    tuning.write(tmp_path / "tuning.json")
    assert Tuning.read(tmp_path / "tuning.json") == tuning


def test_what_a_file_does_not_name_keeps_its_default() -> None:
    read = Tuning.from_json('{"format": 1, "thresholds": {"tree_bytes": 5}}')
    assert read.thresholds == attrs.evolve(DEFAULT_THRESHOLDS, tree_bytes=5)
    assert Tuning.from_json('{"format": 1}') == Tuning()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "not a tuning file of format 1"),
        ('{"format": 2}', "not a tuning file of format 1"),
        ('{"format": 1, "thresholds": []}', "must be objects"),
        ('{"format": 1, "thresholds": {"speed": 1}}', "no threshold is called 'speed'"),
        ('{"format": 1, "thresholds": {"crowd": -1}}', "crowd must be a whole number from 0 on, got -1"),
        ('{"format": 1, "thresholds": {"crowd": true}}', "crowd must be a whole number from 0 on, got True"),
        ('{"format": 1, "thresholds": {"crowd": 1.5}}', "crowd must be a whole number from 0 on, got 1.5"),
        *(
            (
                f'{{"format": 1, "thresholds": {{"gather_mapped_bytes": {row}}}}}',
                "must be 4 whole numbers from 0 on",
            )
            for row in ("7", "[]", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[1, 2, 3, -4]", "[1, 2, 3, 4.5]")
        ),
    ],
)
def test_what_cannot_be_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidUsageError, match=f"here: .*{complaint}"):
        Tuning.from_json(text, "here")


@pytest.mark.parametrize(
    ("ranks", "at"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 3), (17, 3), (500, 3)]
)
def test_every_number_of_ranks_has_its_place_in_a_row(ranks: int, at: int) -> None:
    assert column(ranks) == at
    assert CROWDS[at] >= ranks or at == len(CROWDS) - 1


def test_mapped_tensors_can_be_read_in_place_from_one_size_on_everywhere() -> None:
    limits = DEFAULT_THRESHOLDS.mapped_from(5)
    assert len(MAPPED) == 8
    assert all(set(getattr(limits, name)) == {5} for name in MAPPED)
    assert limits.one_shot_bytes == DEFAULT_THRESHOLDS.one_shot_bytes
    assert limits.whole_bytes == DEFAULT_THRESHOLDS.whole_bytes


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsageError, match=r"nowhere.*cannot be read"):
        Tuning.read(tmp_path / "nowhere")
    path = str(tmp_path / "nowhere")
    with pytest.raises(InvalidUsageError, match="nowhere"):
        dist2.new_group("socket", store=HashStore(), rank=0, world_size=1, tuning=path)


def test_the_environment_names_the_file() -> None:
    assert Config.from_environment({"DIST2_TUNING": "/etc/dist2.json"}).tuning == "/etc/dist2.json"
    assert Config.from_environment({}).tuning is None


def test_all_members_go_by_what_rank_0_read(tmp_path: Path) -> None:
    """Ranks with different tuning files would wait for messages that no rank sends."""
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"format": 1, "thresholds": {"whole_bytes": 0, "doubling_bytes": 0}}))

    def body(pg: ProcessGroup) -> Thresholds:
        part = pg.split([0, 1, 2])
        pg.all_reduce(torch.ones(5))
        backends: list[Any] = [each.backend for each in (pg, part) if each is not None]
        found: Thresholds = backends[0]._place.thresholds
        assert backends[-1]._place.thresholds == found
        if part is not None:
            part.shutdown()
        return found

    options = {**INPROC.options, "tuning": str(path)}
    expected = attrs.evolve(DEFAULT_THRESHOLDS, whole_bytes=0, doubling_bytes=0)
    assert run_ranks(3, body, attrs.evolve(INPROC, options=options)) == [expected] * 3
