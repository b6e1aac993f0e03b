"""Contenders in separate processes: the rest of a benchmark after one of them fails."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import attrs
import pytest
from support.warm_interpreter import warm_executable

from dist2.cli.bench import measuring, peers
from dist2.cli.bench.crew import Crew, CrewError
from dist2.cli.bench.measuring import Contest, Plan
from dist2.cli.bench.peers import DIST2, INTEL_MPI, MPICH, OPEN_MPI, Peer, is_here
from dist2.cli.bench.workloads import BUFFERS, OPERATIONS, Case

CASE = Case("all_reduce", 4096)
PLAN = Plan(2, rounds=2, round_s=0.005)


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks as forks of an interpreter that has imported torch."""
    monkeypatch.setattr(sys, "executable", warm_executable())


@pytest.mark.usefixtures("_warm")
def test_a_contender_that_cannot_start_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = Peer(f"dist2:tcp:{tmp_path}/nowhere", "broken", "broken")
    with Contest([DIST2, broken], PLAN) as contest:
        own, other = contest.measure(CASE)
    assert own.failure is None
    assert len(own.rounds_s) == 2
    assert other.failure is not None
    assert "nowhere" in other.failure
    assert not other.rounds_s


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("own", [False, True], ids=["one session", "own sessions"])
def test_ranks_have_one_session_or_one_each(own: bool, tmp_path: Path) -> None:
    with Crew([DIST2], 2, tmp_path, own_sessions=own) as crew:
        sessions = [os.getsid(process.pid) for process in crew._processes]
        ranks = [process.pid for process in crew._processes]
    assert sessions == (ranks if own else [os.getsid(0)] * 2)


@pytest.mark.usefixtures("_warm")
def test_a_rank_that_dies_is_told_and_takes_its_crew_along(tmp_path: Path) -> None:
    with (
        pytest.raises(CrewError, match=r"dist2: a (rank is gone|process ended)"),
        Crew([DIST2], 2, tmp_path) as crew,
    ):
        assert crew.tell("prepare", CASE.op, CASE.nbytes, False) == [None, None]
        assert crew.tell("verify", DIST2.name) == [None, None]
        processes = crew._processes
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[1].wait()
        while True:  # a warm rank ends a moment after the process that stands for it
            crew.tell("run", DIST2.name, 10, "hot")
    assert all(process.poll() is not None for process in processes)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("buffers", BUFFERS)
def test_every_state_of_buffers_is_measured(buffers: str) -> None:
    with Contest([DIST2], attrs.evolve(PLAN, buffers=buffers)) as contest:
        for case in (CASE, Case("barrier", 0)):
            (found,) = contest.measure(case)
            assert found.failure is None
            assert len(found.rounds_s) == PLAN.rounds


def test_what_would_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "free_memory", lambda: 1 << 20)
    (left_out,) = Contest([DIST2], PLAN).measure(Case("all_reduce", 1 << 20))
    assert left_out.failure == "left out: it may take 0.0 GiB of memory, 0.0 GiB are free"


@pytest.mark.parametrize("peer", [OPEN_MPI, MPICH, INTEL_MPI], ids=lambda peer: peer.name)
def test_an_mpi_does_every_operation_right(peer: Peer) -> None:
    if not is_here(peer):
        pytest.skip(f"{peer.title} is not installed: {peer.install}")
    with Contest([peer], PLAN) as contest:
        for op in OPERATIONS:
            (found,) = contest.measure(Case(op, 0 if op == "barrier" else 4096))
            assert found.failure is None
            assert found.median_s is not None


def test_a_launcher_is_told_where_its_parts_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wheels overwrite each other's mpiexec: that file must not be used."""
    (tmp_path / "bin").mkdir()
    for name in ("prterun", "mpiexec.hydra", "mpiexec"):
        (tmp_path / "bin" / name).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    found = peers.launcher(OPEN_MPI, "/elsewhere")
    assert found is not None
    assert found.command[0] == str(tmp_path / "bin" / "prterun")
    assert found.environment["OPAL_PREFIX"] == str(tmp_path)
    assert found.environment["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/elsewhere"
    found = peers.launcher(MPICH)
    assert found is not None
    assert found.command[0] == str(tmp_path / "bin" / "mpiexec.hydra")
    assert found.environment == {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": f"{tmp_path}/lib"}


def test_intel_mpi_is_where_its_variable_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have the names of MPICH's, in an environment of its own."""
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    monkeypatch.delenv("I_MPI_ROOT", raising=False)
    assert peers.launcher(INTEL_MPI) is None
    monkeypatch.setenv("I_MPI_ROOT", str(tmp_path))
    assert peers.launcher(INTEL_MPI) is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec.hydra").touch()
    found = peers.launcher(INTEL_MPI)
    assert found is not None
    assert found.command[0] == str(tmp_path / "bin" / "mpiexec.hydra")
    assert found.environment["MPI4PY_LIBMPI"] == str(tmp_path / "lib" / "libmpi.so.12")
    assert found.environment["MPI4PY_MPIABI"] == "impi"
