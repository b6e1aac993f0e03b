"""Programs under test: run to their end, with all they said, and stopped if that takes too long."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from support.stores import unused_port
from support.warm_interpreter import warm_python

ROOT = Path(__file__).parent.parent.parent
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STOP_S = 10.0


def _without_gloo(output: str) -> str:
    """Return an output without the lines on stdout by which Gloo of older torch reports connections."""
    return re.sub(r"^\[Gloo\] Rank .*\n", "", output, flags=re.MULTILINE)


@attrs.frozen
class Ended:
    """A program that ended.

    Attributes:
        code: Its exit code.
        output: Its output on stdout, without Gloo's.
        errors: Its output on stderr.
    """

    code: int
    output: str = attrs.field(converter=_without_gloo)
    errors: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.output}\n--- stderr\n{self.errors}"


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without the variables of a launcher, and with the given variables."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables}


def start(command: Sequence[str | Path], **variables: str) -> subprocess.Popen[str]:
    """Start a program in the root of the tree, with its output to be read."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(
    command: Sequence[str | Path], *, timeout_s: float = 45.0, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run a program in the root of the tree.

    Raises:
        AssertionError: It did not end in time; it was stopped.
    """
    process = start(command, **(variables or {}))
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun stops its ranks when asked to, not when killed
        output, errors = process.communicate(timeout=STOP_S)
        raise AssertionError(
            f"{command} did not end within {timeout_s} s\n{Ended(-1, output, errors)}"
        ) from None
    return Ended(process.returncode, output, errors)


def torchrun(script: Path, ranks: int, *arguments: str, folder: Path, timeout_s: float = 50.0) -> Ended:
    """Run a script as ranks under torchrun.

    Its agent uses a file for rendezvous: its own store would listen on all interfaces. Another program may
    take the port that it finds for the ranks before rank 0 has imported torch, so the ranks get another port.

    Args:
        script: The script of each rank.
        ranks: Number of ranks.
        *arguments: The script's.
        folder: A private one, for the file.
        timeout_s: Its time limit.
    """
    python = warm_python()
    command = [*python, "-m", "torch.distributed.run"]
    command += ["--nnodes=1", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/rendezvous"]
    command += ["--rdzv-conf=store_type=file", "--no-python"]
    command += ["env", f"MASTER_PORT={unused_port()}", *python, script, *arguments]
    return run(command, timeout_s=timeout_s, variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def processes_with(text: str) -> list[str]:
    """Return the command lines of the running processes that have a text in theirs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if text in line and entry.parent.name != str(os.getpid()):
            found.append(line)
    return found
