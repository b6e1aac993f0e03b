"""Run programs as ranks that are forks of one process, which has imported torch.

``python -m support.forked_programs PROGRAM...`` prints a JSON object: for each program and backend the exit
codes and the output of the ranks.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401 - imported once for all forks

from support.stores import unused_port

RANKS = 2
LIMIT_S = 40.0


def main() -> None:
    """Run the programs that the arguments name, each on Gloo and on dist2."""
    found = {}
    for program in map(Path, sys.argv[1:]):
        for backend in ("gloo", "dist2"):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                pids = [os.fork() or be(rank, program, backend, Path(folder)) for rank in range(RANKS)]
                codes = collect(pids)
                told = "".join((Path(folder) / f"{rank}").read_text() for rank in range(RANKS))
            found[f"{program.stem} on {backend}"] = (codes, told, time.monotonic() - start)
    print(json.dumps(found))


PORT = unused_port()


def be(rank: int, program: Path, backend: str, folder: Path) -> int:
    """Be a rank: run the program and exit."""
    code = 1
    try:
        with (folder / f"{rank}").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(PORT),
            TMPDIR=str(folder),
        )
        sys.argv = [str(program), "--on", backend]
        sys.path.insert(0, str(program.parent))
        warnings.simplefilter("ignore")
        runpy.run_path(str(program), run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001 - reported in the file
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def collect(pids: list[int]) -> list[int]:
    """Return the exit codes of processes; those that take too long are killed."""
    deadline = time.monotonic() + LIMIT_S
    codes = []
    for pid in pids:
        end = os.pidfd_open(pid)
        if not select.select([end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, 9)
        os.close(end)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


if __name__ == "__main__":
    main()
