"""Rendezvous under torchrun, over the store of its agent, also after a restart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import run

pytestmark = pytest.mark.torchrun

SCRIPT = """
import os, sys, threading
from pathlib import Path
import torch.distributed as dist
from dist2.rendezvous import rendezvous
from dist2.store import shared_server

assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first = rendezvous(timeout=30)
if attempt == 0 and first.rank == 1:
    rendezvous_twice = first.store.set("uneven", "meets less often than rank 0")
    sys.exit(3)
second = rendezvous(timeout=30)
for met in (first, second):
    met.store.set(f"from {met.rank}", f"{met.rank} of {attempt}")
    said = [met.store.get(f"from {rank}").decode() for rank in range(met.world_size)]
    assert said == [f"{rank} of {attempt}" for rank in range(met.world_size)], said
assert not any(shared_server._leases.values())
Path(sys.argv[1], f"met {attempt} {first.rank}").touch()
"""


def apart(*command: str) -> list[str]:
    """Return a command that runs in a network of its own, with nothing but loopback.

    torchrun's agent serves its store on all interfaces, and has no option against it.
    """
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        pytest.skip("needs the programs unshare and ip")
    isolate = [unshare, "--net"] if os.geteuid() == 0 else [unshare, "--net", "--map-root-user"]
    if subprocess.run([*isolate, "true"], capture_output=True, timeout=10, check=False).returncode:
        pytest.skip("needs the right to make a network namespace")
    return [*isolate, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def test_ranks_meet_in_the_agents_store_and_again_after_a_restart(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    met = tmp_path / "met"  # a file each: the ranks share their standard output, and lines may mix
    met.mkdir()
    ended = run(
        apart(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--monitor-interval=0.1",
            str(script),
            str(met),
        ),
        timeout_s=50,
    )
    assert ended.code == 0, ended
    assert sorted(path.name for path in met.iterdir()) == ["met 1 0", "met 1 1"]
