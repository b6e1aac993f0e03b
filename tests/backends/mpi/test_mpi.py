"""MPI under dist2: jobs of Open MPI and of MPICH, from the wheels of the extra ``bench-mpi``.

Ranks are processes that MPI starts. `job` has the tests of failures and arguments, and `conformance` is the
suite for all backends.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from support.programs import ROOT, Ended, run
from support.warm_interpreter import whole_python

from dist2.backends.mpi.communicator import _created
from dist2.cli.bench.peers import MPICH, OPEN_MPI, Launcher, Peer, launcher

HERE = Path(__file__).parent
LIBRARIES = pytest.mark.parametrize("library", [OPEN_MPI, MPICH], ids=lambda library: library.name)


def installed(library: Peer) -> Launcher:
    found = launcher(library, os.environ.get("LD_LIBRARY_PATH"))
    if found is None:
        pytest.skip(f"{library.title} is not installed: {library.install}")
    return found


def run_job(library: Peer, ranks: int, *program: str | Path, options: tuple[str, ...] = ()) -> Ended:
    """Run a program on ranks; the first that fails ends the others.

    Args:
        library: The MPI.
        ranks: How many.
        program: The program and its arguments.
        options: Of the launcher.
    """
    found = installed(library)
    command = [*found.command, *options, "-n", str(ranks), sys.executable, "-m", "mpi4py", *program]
    variables = {**found.environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return run(command, timeout_s=55, variables=variables)


def run_alone(text: str, **variables: str) -> Ended:
    """Run a program that no launcher starts: it is an MPI job of one process."""
    environment = installed(MPICH).environment
    folder = environment.get("LD_LIBRARY_PATH", "").partition(":")[0]
    # A forked interpreter does not read the variable; mpi4py takes a library that is loaded.
    load = f"import ctypes; ctypes.CDLL({folder + '/libmpi.so.12'!r})\n" if folder else ""
    return run([*whole_python(), "-c", load + text], variables={**environment, **variables})


@LIBRARIES
def test_failures_and_arguments(library: Peer) -> None:
    ended = run_job(library, 2, HERE / "job.py")
    assert (ended.code, ended.output.splitlines()[-1:]) == (0, ["all passed"]), str(ended)


def test_a_library_of_mpi_3_makes_communicators_of_the_world() -> None:
    mpi = MagicMock()
    mpi.Intracomm.Create_from_group.side_effect = NotImplementedError
    members = object()
    assert _created(mpi, members, 40_000) is mpi.COMM_WORLD.Create_group.return_value
    mpi.COMM_WORLD.Create_group.assert_called_once_with(members, 40_000 % 32767)


def test_survivors_go_on_where_mpi_lets_them() -> None:
    ended = run_job(
        OPEN_MPI, 3, HERE / "survivors.py", options=("--personality", "ompi", "--with-ft", "ulfm")
    )
    assert ended.output.count("2 survivors, total 2.0\n") == 2, str(ended)


CONFORMANCE = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", HERE / "conformance.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "marks"),
    [
        pytest.param(MPICH, "not exhaustive", id="mpich"),
        pytest.param(MPICH, "", id="mpich-all", marks=pytest.mark.exhaustive),
        pytest.param(OPEN_MPI, "", id="openmpi-all", marks=pytest.mark.exhaustive),
    ],
)
def test_conformance(library: Peer, marks: str) -> None:
    ended = run_job(library, 3, *CONFORMANCE, "-m", marks)
    assert ended.code == 0, str(ended)
    assert " passed" in ended.output, ended


def test_one_process_is_a_job() -> None:
    ended = run_alone(
        "import dist2, torch\n"
        "with dist2.new_group('mpi', 20) as pg:\n"
        "    pg.all_reduce(total := torch.ones(2))\n"
        "    print(pg.size(), total.tolist())\n"
    )
    assert ended.output == "1 [1.0, 1.0]\n", ended


@pytest.mark.parametrize(
    ("prepare", "variables", "words"),
    [
        ("", {"WORLD_SIZE": "4", "RANK": "1"}, "has started 4 processes, and MPI sees 1: start"),
        ("import sys; sys.modules['mpi4py'] = None", {}, r"pip install 'dist2\[mpi\]'"),
        ("import mpi4py.rc; mpi4py.rc.thread_level = 'single'", {}, "MPI_THREAD_MULTIPLE"),
        ("from mpi4py import MPI; MPI.Finalize()", {}, "MPI cannot be used after it was finalized"),
        ("", {"MPI4PY_MPIABI": "", "MPI4PY_LIBMPI": "/nowhere"}, "mpi4py finds no MPI library"),
    ],
    ids=["torchrun", "no mpi4py", "no threads", "finalized", "no library"],
)
def test_the_reason_is_told(prepare: str, variables: dict[str, str], words: str) -> None:
    ended = run_alone(f"{prepare}\nimport dist2\ndist2.new_group('mpi', 20)\n", **variables)
    last = ended.errors.strip().splitlines()[-1]
    assert ended.code == 1, ended
    assert re.search(words, last), ended
