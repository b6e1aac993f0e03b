"""Tests that were late are run again; nothing else is hidden by that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import run_processes
from support.ranks import TENANTS, RankFailed, run_ranks
from support.threads import together
from support.time_limits import TRIES, Late, Verdict, blamed, failure, in_time

import dist2
from dist2 import PeerLostError, ProcessGroup

LATE, LOST, WRONG = Late("0.3 s"), PeerLostError("rank 1 is gone", ranks=[1]), ValueError("3 is not 4")
OTHER = PeerLostError("rank 2 is gone", ranks=[2])


def test_what_is_in_time_is_no_failure() -> None:
    in_time(0.1, 0.2)
    for took_s in (0.2, 0.3):
        with pytest.raises(Late, match=r"0\.\d00 s, promised within 0\.200 s, 'about'"):
            in_time(took_s, 0.2, "about")


@pytest.mark.parametrize(
    ("verdicts", "kind"),
    [
        ((Verdict.LATE,), Late),
        ((Verdict.FOLLOWS, Verdict.LATE), Late),
        ((Verdict.LATE, Verdict.WRONG), AssertionError),
        ((Verdict.FOLLOWS,), AssertionError),
        ((Verdict.WRONG,), AssertionError),
        ((), AssertionError),
    ],
)
def test_who_was_late_excuses_those_who_were_told_of_it(verdicts: tuple[Verdict, ...], kind: type) -> None:
    assert type(failure("what", *verdicts)) is kind


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([LATE], LATE),
        ([LATE, LOST], LATE),
        ([LATE, LOST, WRONG], WRONG),
        ([WRONG, LATE], WRONG),
        ([LOST, LATE, WRONG], WRONG),
        ([LOST, LATE], LATE),
        ([LOST, OTHER], LOST),
        ([WRONG, LOST, AssertionError()], WRONG),
    ],
)
def test_what_is_wrong_is_told_rather_than_what_was_late(errors: list[Exception], told: Exception) -> None:
    assert blamed(errors) is told


def _late_at_0(pg: ProcessGroup, otherwise: type[Exception] | None) -> None:
    if pg.rank() == 0:
        raise Late("0.3 s")
    try:
        pg.barrier()
    except dist2.Dist2Error:
        if otherwise is None:
            raise
        raise otherwise("3 is not 4") from None


def _as_threads(path: Path, otherwise: type[Exception] | None) -> object:
    return run_ranks(2, lambda pg: _late_at_0(pg, otherwise), TENANTS[0])


def _as_processes(path: Path, otherwise: type[Exception] | None) -> object:
    return run_processes(2, _late_at_0, path, otherwise)


@pytest.mark.parametrize("run", [_as_threads, _as_processes])
def test_a_rank_that_was_late_does_not_excuse_another(
    run: Callable[[Path, type[Exception] | None], object], tmp_path: Path
) -> None:
    with pytest.raises(Late, match=r"rank 0: [^$]*0\.3 s"):
        run(tmp_path, None)
    (tmp_path / "other").mkdir()
    with pytest.raises(AssertionError, match="3 is not 4") as caught:
        run(tmp_path / "other", ValueError)
    assert not isinstance(caught.value, Late)
    assert isinstance(caught.value, RankFailed) or run is _as_processes


def test_a_thread_that_was_late_does_not_excuse_another() -> None:
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(ValueError, match="3 is not 4"):
        together(lambda: fail(LATE), lambda: fail(WRONG))


# Limits under pytest

BODY = """
import signal
from contextlib import nullcontext

import pytest
from support import time_limits
from support.time_limits import Late

def place(item, alone):
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "the wait for other workers is timed"
    return nullcontext()

time_limits._place = place
tries = dict.fromkeys(["kept", "not_kept", "wrong", "wrong_then", "untidy"], 0)

@pytest.fixture
def count(request):
    tries[request.param] += 1
    yield tries[request.param]
    if (request.param, tries[request.param]) == ("untidy", 1):
        raise ValueError("left something")

def test(count, request):
    name = request.node.callspec.id
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60, "a run has not the timeout of a test"
    signal.setitimer(signal.ITIMER_REAL, 1000)
    if name == "wrong" or (name, count) == ("wrong_then", 2):
        raise ValueError(f"{name}, try {count}")
    if (name, count) != ("kept", 3):
        raise Late(f"{count} s")

def pytest_generate_tests(metafunc):
    metafunc.parametrize("count", list(tries), indirect=True)
"""


def test_tests_that_were_late_are_run_again_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text(BODY)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "support.time_limits",
        "-p",
        "no:cacheprovider",
        "--timeout=60",
        "--rootdir",
        ".",
    ]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    lines = ended.stdout.splitlines()
    each = "; ".join(f"{count} s" for count in range(1, TRIES + 1))
    assert [line.partition("::")[2] for line in lines if line.startswith("LATE ")] == [
        "test[kept] (passed): 1 s; 2 s",
        f"test[not_kept] (failed): {each}",
        "test[wrong_then] (failed): 1 s",
        "test[untidy] (failed): 1 s",
    ], ended.stdout
    told = [line for line in lines if line.startswith("E  ")]
    assert [line.split(maxsplit=1)[1] for line in told] == [
        "ValueError: left something",
        f"support.time_limits.Late: {TRIES} s",
        "ValueError: wrong, try 1",
        "ValueError: wrong_then, try 2",
        "support.time_limits.Late: 1 s",
    ], ended.stdout
    assert "4 failed, 1 passed, 1 error" in lines[-1]
