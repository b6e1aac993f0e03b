"""Ranks by the environment of a launcher: torchrun, Open MPI, MPICH, Slurm, PMIx.

``env://`` reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun
and `dist2.run` set them. Other launchers tell each process its place under names of their own. `launched`
finds them, and a place to meet:

- All ranks on one host meet in a file, whose name is unique to the job. No port has to be free.
- Ranks of several hosts meet at the first host of the Slurm step, at a port made of the job's number.
  Open MPI and MPICH name no host: there the user sets ``MASTER_ADDR`` and ``MASTER_PORT``. PMIx by itself
  tells the rank alone.

Variables of torchrun win where they are set: ``MASTER_ADDR`` beside Open MPI's rank, for instance. Slurm
counts only inside a step (``srun``): a batch script has the number of tasks as well, and is one process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs

from dist2.runtime.config import environment_value, temporary_folder

_FIRST_PORT, _PORTS = 20_000, 12_700
"""Ports of Slurm jobs; below those that Linux gives to clients."""


@attrs.frozen
class Launched:
    """The place that a launcher has given this process.

    Attributes:
        launcher: Name of the launcher.
        rank: The caller's rank.
        world_size: Number of ranks.
        local_rank: The caller's number on its host, if the launcher tells it.
        host: Where rank 0 is; None if all ranks are on one host, or if the launcher does not tell.
        port: Where ranks meet there.
        file: Where ranks of one host meet.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    host: str | None = None
    port: int | None = None
    file: str | None = None

    def variables(self) -> dict[str, str]:
        """Return the place by the names of torchrun's variables."""
        named = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "MASTER_ADDR": self.host,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in named.items() if value is not None}


Get = Callable[[str], str | None]


def launched(get: Get = environment_value) -> Launched | None:
    """Return the place that a launcher other than torchrun has given this process; None without one.

    Args:
        get: Returns an environment variable, or None.
    """
    if get("RANK") or get("WORLD_SIZE"):
        return None
    for find in (_open_mpi, _mpich, _slurm):
        found = find(get)
        if found is not None:
            return found
    return None


def variable(name: str) -> str | None:
    """Return a variable that torchrun sets, or its value by the environment of another launcher."""
    value = environment_value(name)
    if value:
        return value
    found = launched()
    if found is not None:
        return found.variables().get(name)
    return environment_value("PMIX_RANK") if name == "RANK" and environment_value("WORLD_SIZE") else None


def meeting_file() -> str | None:
    """Return the file where the ranks of one host meet, if a launcher is there and no address is given."""
    found = None if environment_value("MASTER_ADDR") else launched()
    return None if found is None else found.file


_INTERACTIVE = ("", "-c", "ipykernel_launcher.py")
"""What stands for the program in the REPL, in ``python -c`` and in notebooks."""


def how_to_launch(program: str) -> str:
    """Return the commands that start a program as ranks, for the error of a missing variable.

    Args:
        program: The program that is run.
    """
    script = Path(program).name
    found = launched()
    if found is not None:
        return (
            f"{found.launcher} has started this process as rank {found.rank} of {found.world_size} on "
            f"several hosts and does not tell where rank 0 is: set MASTER_ADDR and MASTER_PORT on all ranks, "
            f"or let MPI tell it by init_method='mpi://' (pip install 'dist2[mpi]')"
        )
    if environment_value("PMIX_RANK"):
        return (
            "PMIx tells the rank and neither the number of ranks nor a place to meet: set WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT on all ranks, or let MPI tell them by init_method='mpi://' "
            "(pip install 'dist2[mpi]')"
        )
    if script in _INTERACTIVE:
        return (
            "call a function on ranks, dist2.launch.local(fn, 4), which makes its group there, or give rank "
            "and world_size and where to meet"
        )
    return (
        f"start the program with a launcher, `python -m dist2.run -n 4 {script}`, "
        f"`torchrun --nproc-per-node=4 {script}`, `mpiexec -n 4 python {script}` or "
        f"`srun -n 4 python {script}`, or give rank and world_size and where to meet"
    )


_SAME = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMI_SIZE", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""Variables that are equal on all ranks of a job of one host."""


def processes_of_ranks() -> dict[int, int]:
    """Return the processes of this host that the launcher of this one has started, by rank.

    A rank that has not registered yet is known by its environment alone, which is that of its start.
    """
    program, here = _program("self"), _environment("self")
    by_rank: dict[int, int] = {}
    for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        if _program(pid) == program:
            there = _environment(pid)
            found = launched(there.get)
            told = there.get("RANK", "") if found is None else str(found.rank)
            if told.isdecimal() and all(there.get(name) == here.get(name) for name in _SAME):
                by_rank.setdefault(int(told), pid)  # its workers come after it
    return by_rank


def _program(pid: object) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/exe").readlink())
    return ""


def _environment(pid: object) -> dict[str, str]:
    """Return the environment with which a process of this user was started; of others, an empty one."""
    with suppress(OSError):
        parts = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(part.split("=", 1) for part in parts if "=" in part)
    return {}


# One function a launcher


def _open_mpi(get: Get) -> Launched | None:
    numbers = _numbers(get, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if numbers is None:
        return None
    rank, size, here = numbers
    job = get("PMIX_NAMESPACE") or get("OMPI_MCA_ess_base_jobid") or _parent()
    local = _number(get, "OMPI_COMM_WORLD_LOCAL_RANK")
    return Launched("Open MPI", rank, size, local, file=_file(job) if here == size else None)


def _mpich(get: Get) -> Launched | None:
    numbers = _numbers(get, "PMI_RANK", "PMI_SIZE")
    if numbers is None:
        return None
    rank, size = numbers
    here = _number(get, "MPI_LOCALNRANKS")
    step = _slurm(get) if here is None else None
    if step is not None and (step.rank, step.world_size) == numbers:  # srun --mpi=pmi2: it tells the host too
        return None
    local = _number(get, "MPI_LOCALRANKID")
    file = _file(_parent("hydra_pmi_proxy")) if here == size else None
    return Launched("MPICH", rank, size, local, file=file)


def _slurm(get: Get) -> Launched | None:
    numbers = _numbers(get, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
    if numbers is None:
        return None
    rank, size, job, step = numbers
    local = _number(get, "SLURM_LOCALID")
    if _number(get, "SLURM_STEP_NUM_NODES") == 1:
        return Launched("Slurm", rank, size, local, file=_file(f"slurm-{job}-{step}"))
    host = first_host(get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST") or "")
    reserved = re.match(r"\d+", get("SLURM_STEP_RESV_PORTS") or "")
    port = int(reserved[0]) if reserved else _FIRST_PORT + (job * 31 + step) % _PORTS
    return Launched("Slurm", rank, size, local, host or None, port if host else None)


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: ``node[07-09,12]-ib,login1`` is ``node07-ib``."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first[0]) if first else ""


def _numbers(get: Get, *names: str) -> tuple[int, ...] | None:
    """Return variables as numbers; None if one is missing or is none."""
    found = tuple(number for name in names if (number := _number(get, name)) is not None)
    return found if len(found) == len(names) else None


def _number(get: Get, name: str) -> int | None:
    text = get(name) or ""
    return int(text) if text.isdecimal() else None


def _file(job: str) -> str:
    """Return the path of a file that is this job's and this user's alone."""
    name = re.sub(r"[^\w.-]", "_", job)
    return str(Path(temporary_folder()) / f"dist2-{os.getuid()}-{name}")


def _parent(named: str = "") -> str:
    """Return a name for the process that has started the ranks of this host; never used twice.

    Args:
        named: Its command; an ancestor is looked for, as a shell may stand between. By default the parent.
    """
    process = parent = os.getppid()
    while process > 1:
        command, above, start = _status(process)
        if command == named:
            return f"{process}-{start}"
        process = above
    return f"{parent}-{_status(parent)[2]}"


def _status(process: int) -> tuple[str, int, str]:
    """Return a process's command, its parent, and its start in ticks since boot."""
    head, _, tail = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    fields = tail.split()
    return head.partition("(")[2], int(fields[1]), fields[19]
