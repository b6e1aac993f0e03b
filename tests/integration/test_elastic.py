"""A number of ranks that changes under torchrun, and ranks of `torch.multiprocessing.spawn`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import STOP_S, Ended, run, start

SPAWNED = """
import sys
import torch, dist2.legacy as dist

def main(rank, url):
    dist.init_process_group(init_method=url, rank=rank, world_size=2)
    dist.all_reduce(total := torch.tensor([rank + 1.0]))
    assert total.item() == 3
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=2)
    print("ok")
"""

ELASTIC = """
import os, sys, time
import torch, dist2
from collections.abc import Callable
from pathlib import Path

pg = dist2.new_group("socket", 60)
place = Path(sys.argv[1], f"{pg.size()}-{pg.rank()}")
place.with_suffix(".new").write_text(f"{os.getppid()} {os.getpid()}")
place.with_suffix(".new").rename(place)
while pg.size() == 2 or not Path(sys.argv[1], "end").exists():
    pg.all_reduce(torch.ones(1))
    time.sleep(0.01)
pg.shutdown()
"""


def torchrun(*arguments: str | Path) -> list[str | Path]:
    command: list[str | Path] = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1"]
    return [*command, "--rdzv-backend=c10d", *arguments]


def written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


@pytest.mark.exhaustive
@pytest.mark.torchrun
@pytest.mark.timeout(180)
def test_a_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Two agents with one rank each: one agent is killed, and the other restarts its rank, alone."""
    program, place = written(tmp_path, ELASTIC), tmp_path / "seen"
    place.mkdir()
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=elastic"]
    options += [f"--rdzv-endpoint={tmp_path}/rendezvous", "--rdzv-conf=store_type=file,last_call_timeout=2"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [start(torchrun(*options, program, place), **variables) for _ in range(2)]
    try:
        _until(lambda: (place / "2-0").exists() and (place / "2-1").exists(), 60)
        ranks: dict[int, int] = {}
        for rank in range(2):
            agent_id, process = map(int, (place / f"2-{rank}").read_text().split())
            ranks[agent_id] = process
        for process in (agents[1].pid, ranks[agents[1].pid]):  # torchrun gives ranks sessions of their own
            os.kill(process, signal.SIGKILL)
        _until(lambda: (place / "1-0").exists(), 90)
        (place / "end").touch()
        output, errors = agents[0].communicate(timeout=30)
        assert agents[0].returncode == 0, Ended(agents[0].returncode, output, errors)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(STOP_S)
            agent.communicate()


def _until(met: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_ranks_of_mp_spawn(tmp_path: Path) -> None:
    ended = run([sys.executable, written(tmp_path, SPAWNED), f"file://{tmp_path}/meeting"])
    assert (ended.code, ended.output) == (0, "ok\n"), ended
