"""The demo: training, verdict and clean-up, also after failures."""

from __future__ import annotations

import os
import pty
import runpy
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from support.programs import ROOT, processes_with, run, start
from support.torch_features import has
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

DEMO = ROOT / "examples" / "demo"

pytestmark = pytest.mark.torchrun


def demo(out: Path, *, ranks: int, epochs: int) -> list[str | Path]:
    warm_executable()  # torchrun and its ranks are forks too
    return [*warm_python(), CHILDREN, DEMO, f"--ranks={ranks}", f"--epochs={epochs}", f"--out={out}"]


def test_it_learns_to_read_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST2_WAITING", "1")
    ended = run(demo(tmp_path, ranks=2, epochs=10))
    assert ended.code == 0, ended
    assert "is waited for by rank 1 in barrier #232" not in ended.output + ended.errors, "rank 0 reports"
    figures = dict(
        line.strip("│ ").split("│", 1) for line in ended.output.splitlines() if line.count("│") == 3
    )
    figures = {name.strip(): value.strip() for name, value in figures.items()}
    assert float(figures["test accuracy"].rstrip("%")) >= 95
    assert figures["weights"].startswith("bitwise the same on 2 ranks")
    # 10 epochs of 21 steps and a test, 8 broadcast parameters, a barrier, the exchanges of weights and times
    assert figures["collectives"] == "231, 0 failed"
    assert {"steps/s", "payload", "all_reduce p50", "all_reduce p99", "slowest rank"} <= set(figures)
    assert "curl -H 'Authorization: Bearer " in ended.output
    assert "#token=" in ended.output
    assert {path.name for path in (tmp_path / "flight").iterdir()} == {"rank_0", "rank_1"}
    if has("analyser"):
        assert "all recorded collectives match, no rank is missing" in ended.output


@pytest.mark.timeout(120)
def test_two_at_a_time_and_one_learns_too_little(tmp_path: Path) -> None:
    """The second finds the folder taken, and no port is chosen before a process listens there."""
    out = tmp_path / "out"
    first = start(demo(out, ranks=1, epochs=100_000))
    try:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("Control plane")
        ended = run(demo(out, ranks=1, epochs=1))
        assert ended.code == 1, ended
        assert "is below 95%" in ended.errors.splitlines()[-1]
        assert not (out / "result.json").exists()
        assert (tmp_path / "out-2" / "result.json").exists()
        assert f"{out}-2/flight" in "".join(ended.output.split())
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=20)
    assert first.returncode == 130


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(demo(tmp_path, ranks=2, epochs=100_000))
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("Control plane"), first
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    told = errors.splitlines()
    assert told == ["demo failed: interrupted; all ranks were stopped"]
    assert not processes_with(str(tmp_path))


IN_TERMINAL = """
import runpy, sys
_, sys.executable, *sys.argv = sys.argv
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_hold_with_success(tmp_path: Path) -> None:
    """As under `make`: the terminal must not send a signal, or make would report an error."""
    leader, terminal = pty.openpty()
    # The program of `warm_python` would run outside of the terminal's session; what the demo starts may.
    arguments = ["--ranks=1", "--epochs=10", "--hold=100", f"--out={tmp_path}"]
    command = [sys.executable, "-c", IN_TERMINAL, warm_executable(), DEMO, *arguments]
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=terminal, stdout=terminal, stderr=terminal, text=True
    )
    os.close(terminal)
    shown = ""
    try:
        while "any key ends them" not in shown:
            shown += os.read(leader, 4096).decode()
        end_s = time.monotonic() + 20
        while termios.tcgetattr(leader)[3] & termios.ISIG:
            assert time.monotonic() < end_s, "the demo does not read keys"
            time.sleep(0.01)
        os.write(leader, b"\x03")
        assert process.wait(30) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert not processes_with(str(tmp_path))


SLOW = {
    "noise": ([[1.0, 2.0] * 10, [2.0, 1.0] * 10], 100.0, "none stands out"),
    "short": ([[0.10] * 20, [0.11] * 20], 100.0, "none stands out"),
    "few": ([[1.0] * 3, [9.0] * 3], 10.0, "none stands out"),
    "slow": (
        [[9.0] * 20, [1.0] * 20, [8.0] * 20],
        300.0,
        "1, last in 20 of 20 epochs: the others waited 140.00 s",
    ),
    "alone": ([[1.0] * 20], 30.0, "none stands out"),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_slow_rank_is_named_only_if_noise_does_not_explain_it(report: Any, case: str) -> None:
    waiting_s, elapsed_s, expected = SLOW[case]
    assert report["slowest"](waiting_s, elapsed_s).startswith(expected)


def test_what_is_missing_is_named() -> None:
    ended = run([sys.executable, "-I", "-S", DEMO])  # without site-packages nothing is installed
    assert ended.code == 2
    assert "sklearn (pip install 'dist2[bench]')" in ended.errors


def test_bad_arguments_are_refused() -> None:
    ended = run([*warm_python(), DEMO, "--ranks=0"])
    assert ended.code == 2
    assert "must be at least 1, got 0" in ended.errors


@pytest.fixture
def result_type(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEMO))
    names = runpy.run_path(str(DEMO / "rank.py"), run_name="rank")
    yield names["Result"]
    for name in ("digits", "report"):
        sys.modules.pop(name, None)


@pytest.fixture
def report() -> Any:
    return runpy.run_path(str(DEMO / "report.py"), run_name="report")


def test_ranks_that_differ_are_named(result_type: Any) -> None:
    same = result_type(accuracy=0.97, digests=("a", "a"), steps=1, elapsed_s=1.0)
    assert not same.complaints
    differ = result_type(accuracy=0.97, digests=("a", "b", "a", "c"), steps=1, elapsed_s=1.0)
    assert differ.complaints == ["weights of rank(s) 1, 3 differ from those of rank 0"]
