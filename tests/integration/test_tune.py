"""``benchmarks/tune.py`` writes a file that new groups go by."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tune as tune_module
from click.testing import CliRunner
from crossings import CROSSINGS, Crossing
from support.ranks import TENANTS, run_ranks
from support.warm_interpreter import warm_executable
from tune import tune
from tuner import Finding

from dist2 import ProcessGroup
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Thresholds, Tuning


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks as forks of an interpreter that has imported torch."""
    monkeypatch.setattr(sys, "executable", warm_executable())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--only", "luck"], 2, "'luck' is none of one_shot_bytes"),
        (["--only", "tree_bytes", "--ranks", "2"], 1, "2 ranks cannot measure 'tree_bytes'"),
        (["--budget", "0"], 2, "0.0 is not in the range"),
        (["--budget", "nan"], 2, "'--budget': nan is not a number"),
        (["--ranks", "1"], 2, "1 is not in the range"),
        (["--out", "/proc/dist2/here.json"], 2, "'--out': '/proc/dist2' cannot be made: No such file"),
        (["--out", "/proc/here.json"], 2, "'--out': nothing can be written in '/proc'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    out = tmp_path / "tuning.json"
    ended = CliRunner().invoke(tune, ["--out", str(out), *arguments])
    assert ended.exit_code == code
    assert says in " ".join(ended.output.split())
    assert not out.exists()


@pytest.mark.usefixtures("_warm")
def test_groups_go_by_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "tuning.json"
    arguments = ["--only", "one_shot_bytes", "--budget", "15", "--out", str(out)]
    ended = CliRunner().invoke(tune, arguments)
    assert ended.exit_code == 0, ended.output
    assert f"export DIST2_TUNING={out}" in ended.output
    figures = json.loads(out.read_text())["measured"]["figures"]["one_shot_bytes"]
    assert len(figures["bytes"]) == len(figures["short_s"]) == len(figures["long_s"]) >= 5
    found = Tuning.read(out).thresholds
    assert found.one_shot_bytes[0] > 0
    assert found.one_shot_bytes[1:] == DEFAULT_THRESHOLDS.one_shot_bytes[1:]  # those are for more ranks
    assert found.whole_bytes == DEFAULT_THRESHOLDS.whole_bytes  # was not asked for

    def body(pg: ProcessGroup) -> Thresholds:
        backend: Any = pg.backend
        used: Thresholds = backend._place.thresholds
        return used

    monkeypatch.setenv("DIST2_TUNING", str(out))
    assert run_ranks(2, body, TENANTS[0]) == [found] * 2


@pytest.mark.usefixtures("_warm")
def test_no_time_is_no_file_of_guesses(tmp_path: Path) -> None:
    """Thresholds without a complete measurement keep their defaults."""
    out = tmp_path / "tuning.json"
    ended = CliRunner().invoke(tune, ["--only", "whole_reduce_bytes", "--budget", "1", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    assert "not measured" in ended.output
    assert "time was up, or groups failed: 1 of 1 constants keep their defaults" in ended.output
    assert Tuning.read(out).thresholds == DEFAULT_THRESHOLDS


class Interrupted:
    """A tuner that Ctrl-C ends when it has found so many constants."""

    def __init__(self, found: int) -> None:
        self.crossings = CROSSINGS[:3]
        self.steps = 9
        self.found = found

    def __enter__(self) -> Interrupted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, crossing: Crossing, step: Callable[[], None]) -> Finding:
        if not self.found:
            raise KeyboardInterrupt
        self.found -= 1
        step()
        return Finding(crossing, 12288)


def test_ctrl_c_saves_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "Tuner", lambda *_: Interrupted(1))
    out = tmp_path / "tuning.json"
    ended = CliRunner().invoke(tune, ["--out", str(out)])
    assert ended.exit_code == 130, ended.output
    assert "interrupted: 2 of 3 constants keep their defaults" in ended.output
    expected = CROSSINGS[0].changed(DEFAULT_THRESHOLDS, 12288, 2)
    assert Tuning.read(out).thresholds == expected != DEFAULT_THRESHOLDS


def test_ctrl_c_before_anything_is_measured_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "Tuner", lambda *_: Interrupted(0))
    ended = CliRunner().invoke(tune, ["--out", str(tmp_path / "tuning.json")])
    assert ended.exit_code == 1
    assert "Aborted" in ended.output
    assert not list(tmp_path.iterdir())
