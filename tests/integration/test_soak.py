"""The soak: a few episodes of it that contain each fault, and its check of results."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import oracle
from support.programs import ROOT, run
from support.warm_interpreter import warm_python

from dist2.operation.kinds import Reduction

SOAK = ROOT / "benchmarks" / "soak.py"
SEED, EPISODES, RANKS = 140, 8, 3


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SOAK.parent))
    yield importlib.import_module("soak_plan")
    sys.modules.pop("soak_plan", None)


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.exhaustive)])
def test_a_short_soak_finds_nothing(plan: ModuleType, transport: str, tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [*warm_python(), SOAK, f"--seed={SEED}", f"--episodes={EPISODES}", f"--ranks={RANKS}"]
    ended = run([*command, f"--transport={transport}", f"--out={out}"])
    assert ended.code == 0, ended
    report = json.loads(out.read_text())
    assert report["episodes"] == EPISODES
    assert sum(report["operations"].values()) > 100
    assert report["wrong"] == []
    assert report["leaked"] == 0
    assert set(report["survived"]) == set(plan.FAULTS) - {"none"}
    assert report["survived"] == report["injected"]


def test_episodes_follow_from_the_seed(plan: ModuleType) -> None:
    first, again = ([plan.episode(seed, n, 4) for n in range(20)] for seed in (5, 5))
    assert first == again
    assert first != [plan.episode(6, n, 4) for n in range(20)]


@pytest.mark.parametrize("reduction", ["sum", "min", "max"])
def test_it_expects_what_the_other_oracle_does(plan: ModuleType, reduction: str) -> None:
    for dtype in plan.DTYPES:
        step = plan.Step("all_reduce", True, dtype, 100, reduction, salt=9)
        inputs = [plan.values(step, rank) for rank in range(3)]
        assert not torch.equal(inputs[0], inputs[1])
        wanted = oracle.reduced(inputs, Reduction.of(getattr(torch.distributed.ReduceOp, reduction.upper())))
        assert torch.equal(plan.reduced(step, 3), wanted), dtype
