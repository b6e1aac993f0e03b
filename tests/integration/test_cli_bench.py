"""The command line: arguments, errors for missing packages, and a small benchmark that runs."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.programs import ROOT, processes_with, run, start
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

from dist2.cli.app import cli
from dist2.cli.bench import peers
from dist2.cli.bench.measuring import Measurement, Plan
from dist2.cli.bench.peers import Peer
from dist2.cli.bench.report import load
from dist2.cli.bench.workloads import Case

bench_module = import_module("dist2.cli.bench.command")


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks as forks of an interpreter that has imported torch."""
    monkeypatch.setattr(sys, "executable", warm_executable())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--op", "all_reduce,sing"], "'sing' is none of all_reduce"),
        (["bench", "--op", ","], "it is empty"),
        (["bench", "--sizes", "8,big"], "'big' is not a size"),
        (["bench", "--sizes", "1"], "1 bytes are too few: a float32 takes 4"),
        (["bench", "--ranks", "1"], "1 is not in the range"),
        (["bench", "--transport", "smoke"], "'smoke' is none of shm, tcp"),
        (["bench", "--peers", "nccl"], "'nccl' is none of gloo, openmpi, mpich"),
        (["bench", "--rounds", "0"], "0 is not in the range"),
        (["bench", "--out", "/proc/dist2"], "'--out': '/proc/dist2' cannot be made: No such file"),
        (["bench", "--out", "/proc"], "'--out': nothing can be written in '/proc'"),
        (["bench", "--budget", "nan"], "'--budget': nan is not a number"),
        (["bench", "--quiet", "nan"], "'--quiet': nan is not a number"),
        (["bench", "--quiet", "-1"], "-1.0 is not in the range"),
        (["sing"], "No such command 'sing'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], says: str) -> None:
    ended = CliRunner().invoke(cli, arguments)
    assert ended.exit_code == 2
    assert says in " ".join(ended.output.split())


def test_a_peer_that_is_not_here_is_told_with_its_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(cli, ["bench", "--peers", "mpich"])
    assert ended.exit_code == 1
    assert not list(tmp_path.iterdir()), "it makes no folder for what it does not measure"
    assert "pip install 'mpi4py>=4' 'mpich>=4.2'" in ended.output


def test_help_and_version_name_what_there_is() -> None:
    assert "bench" in CliRunner().invoke(cli, ["--help"]).output
    version = CliRunner().invoke(cli, ["--version"]).output
    assert version.startswith("dist2 0.")


def test_a_missing_extra_is_told(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('No module named click', name='click')")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import dist2.cli as c; c.main()"
    )
    ended = run([sys.executable, "-c", program, "top"])
    assert ended.code == 1
    assert "pip install 'dist2[control-plane]'" in ended.errors


@pytest.mark.usefixtures("_warm")
def test_a_run_ends_when_its_time_is_up(tmp_path: Path) -> None:
    arguments = [
        "bench",
        "--quick",
        "--budget",
        "1",
        "--rounds",
        "2000",
        "--peers",
        "none",
        "--transport",
        "shm",
    ]
    ended = CliRunner().invoke(cli, [*arguments, "--sizes", "8,16,32", "--out", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    assert "time is up: 2 of 3 cases were left out" in ended.output
    (measured,) = load(tmp_path / "2-ranks.json")[0]
    assert len(measured.own.rounds_s) < 2000


class Interrupted:
    """A comparison that Ctrl-C ends during its second case."""

    def __init__(self, contenders: Sequence[Peer], plan: Plan, until_ns: int) -> None:
        self._names = [peer.name for peer in contenders]
        self._begun = 0

    def __enter__(self) -> Interrupted:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def measure(self, case: Case) -> list[Measurement]:
        self._begun += 1
        if self._begun > 1:
            raise KeyboardInterrupt
        return [Measurement(case, name, (1e-6, 2e-6), None, 0.0) for name in self._names]


def test_ctrl_c_saves_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "Contest", Interrupted)
    arguments = ["bench", "--quick", "--peers", "gloo", "--out", str(tmp_path)]
    ended = CliRunner().invoke(cli, arguments)
    assert ended.exit_code == 130, ended.output
    assert "interrupted: 2 of 3 cases were left out" in ended.output
    comparisons, _ = load(tmp_path / "2-ranks.json")
    assert len(comparisons) == 1


@pytest.mark.parametrize(("wrong", "code"), [("dist2:tcp", 1), ("gloo", 0)])
def test_a_wrong_result_of_dist2_fails_the_command(
    wrong: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Interrupted):
        """A comparison in which the results of one contender are wrong."""

        def measure(self, case: Case) -> list[Measurement]:
            failures = {wrong: "7 of 8 elements are wrong"}
            return [Measurement(case, name, (1e-6,), failures.get(name), 0.0) for name in self._names]

    monkeypatch.setattr(bench_module, "Contest", Wrong)
    arguments = ["bench", "--quick", "--peers", "gloo", "--out", str(tmp_path)]
    ended = CliRunner().invoke(cli, arguments)
    assert (ended.exit_code, "7 of 8 elements are wrong" in ended.output) == (code, True), ended.output
    assert (tmp_path / "2-ranks.json").exists()


@pytest.mark.usefixtures("_warm")
def test_a_small_benchmark_measures_checks_and_saves(tmp_path: Path) -> None:
    arguments = ["bench", "--quick", "--op", "all_reduce,barrier", "--sizes", "8,64KiB", "--rounds", "2"]
    ended = CliRunner().invoke(
        cli, [*arguments, "--transport", "shm", "--peers", "gloo", "--out", str(tmp_path)]
    )
    assert ended.exit_code == 0, ended.output
    assert "of 3 cases" in ended.output
    found = json.loads((tmp_path / "2-ranks.json").read_text())
    assert [(case["op"], case["nbytes"]) for case in found["cases"]] == [
        ("all_reduce", 8),
        ("all_reduce", 65536),
        ("barrier", 0),
    ]
    for case in found["cases"]:
        assert set(case["contenders"]) == {"dist2", "gloo"}
        for figures in case["contenders"].values():
            assert figures["failure"] is None
            assert len(figures["rounds_s"]) == 2
            assert 0 < figures["median_s"] < 1
        own, gloo = case["contenders"]["dist2"], case["contenders"]["gloo"]
        assert gloo["ratio"] == pytest.approx(gloo["median_s"] / own["median_s"])
    assert (tmp_path / "2-ranks.png").read_bytes().startswith(b"\x89PNG")
    assert "**`all_reduce`**" in (tmp_path / "2-ranks.md").read_text()
    comparisons, contenders = load(tmp_path / "2-ranks.json")
    assert [each.name for each in contenders] == ["dist2", "gloo"]
    assert comparisons[1].ratio("gloo") == found["cases"][1]["contenders"]["gloo"]["ratio"]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("command", "request_to_stop"),
    [(["-m", "dist2.cli", "bench"], signal.SIGTERM), ([str(ROOT / "benchmarks" / "tune.py")], signal.SIGHUP)],
    ids=["bench", "tune"],
)
def test_who_is_asked_to_stop_leaves_nothing(
    tmp_path: Path, command: list[str], request_to_stop: signal.Signals
) -> None:
    out = tmp_path / "out"
    warm_executable()
    program = [*warm_python(), CHILDREN, *command, "--out", out]
    process = start(program, TMPDIR=str(tmp_path), PYTHONPATH=str(ROOT))
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("dist2-bench-*/*.sock")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "it did not begin"
            time.sleep(0.05)
        assert processes_with(str(tmp_path))
        process.send_signal(request_to_stop)
        output, errors = process.communicate(timeout=15)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, (output, errors)
    assert errors.strip() == "Aborted!"
    assert [path.name for path in tmp_path.iterdir() if path != out] == []
    # A process that was just being started finds no peer when it has imported torch, and ends.
    while processes_with(str(tmp_path)):
        assert time.monotonic() < deadline, processes_with(str(tmp_path))
        time.sleep(0.05)
