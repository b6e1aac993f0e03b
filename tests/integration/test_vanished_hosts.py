"""A host that vanishes without a word: network namespaces whose cable is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HEARTBEAT_S = 3
RANK = """
import sys, time, torch, dist2
rank, path, numel = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = dist2.FileStore(path, 2)
pg = dist2.new_group("socket", 60, store=store, rank=rank, world_size=2)
pg.barrier()
print("ready", flush=True)
sys.stdin.readline()
if rank == 1:
    time.sleep(60)
start = time.monotonic()
try:
    pg.all_reduce(torch.ones(numel))
except dist2.PeerLostError as error:
    print(time.monotonic() - start, error.ranks, flush=True)
pg.abort()
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"dist2a{os.getpid()}", f"dist2b{os.getpid()}")
    try:
        for name in names:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "cable", "netns", names[1])
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.213.0.{number + 1}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


@pytest.mark.parametrize("numel", [4, 4_000_000])
def test_a_host_that_vanishes_is_lost_in_the_time_set(
    hosts: tuple[str, str], tmp_path: Path, numel: int
) -> None:
    path = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-c",
                RANK,
                str(rank),
                str(path),
                str(numel),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DIST2_HOST": f"10.213.0.{rank + 1}", "DIST2_HEARTBEAT": str(HEARTBEAT_S)},
        )
        for rank, name in enumerate(hosts)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        # Nothing passes any more, and nobody is told: the cable's ends stay up.
        for name in hosts:
            _ip("-n", name, "route", "flush", "dev", "cable")
            _ip("-n", name, "route", "add", "blackhole", "10.213.0.0/24")
        assert ranks[0].stdin is not None
        assert ranks[0].stdout is not None
        ranks[0].stdin.write("go\n")
        ranks[0].stdin.flush()
        elapsed, lost = ranks[0].stdout.readline().split(maxsplit=1)
        assert lost == "(1,)\n"
        assert 1.0 < float(elapsed) < HEARTBEAT_S + 1.5
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
