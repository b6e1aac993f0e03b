"""A host that vanishes without a word: network namespaces whose cable is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
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


SERVER = """
import sys, dist2
store = dist2.TCPStore("10.213.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.readline()
"""
CLIENT = """
import sys, time, dist2
port, asks = int(sys.argv[1]), sys.argv[2]
store = dist2.TCPStore("10.213.0.1", port, timeout=60, wait_for_workers=False)
print("ready", flush=True)
if asks == "before":
    print("waits", flush=True)
else:
    sys.stdin.readline()
start = time.monotonic()
try:
    store.get("a key that never comes")
except dist2.StoreTimeoutError:
    print("waited in vain", flush=True)
except dist2.errors.StoreConnectionError as error:
    print(time.monotonic() - start, error, flush=True)
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


def cut(hosts: tuple[str, str]) -> None:
    """Let nothing pass any more, and tell nobody: the cable's ends stay up."""
    for name in hosts:
        _ip("-n", name, "route", "flush", "dev", "cable")
        _ip("-n", name, "route", "add", "blackhole", "10.213.0.0/24")


def start_on(host: str, program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DIST2_HEARTBEAT": str(HEARTBEAT_S), **variables},
    )


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("numel", [4, 4_000_000])
def test_a_host_that_vanishes_is_lost_in_the_time_set(
    hosts: tuple[str, str], tmp_path: Path, numel: int
) -> None:
    path = tmp_path / "store"
    ranks = [
        start_on(name, RANK, str(rank), str(path), str(numel), DIST2_HOST=f"10.213.0.{rank + 1}")
        for rank, name in enumerate(hosts)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        cut(hosts)
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


@pytest.mark.parametrize("asks", ["before", "after"])
def test_a_store_whose_host_vanishes_is_lost_in_the_time_set(hosts: tuple[str, str], asks: str) -> None:
    """Whether its client waits by then, or asks only later."""
    processes = [start_on(hosts[0], SERVER)]
    try:
        port = said_by(processes[0])
        processes.append(start_on(hosts[1], CLIENT, port, asks, DIST2_HEARTBEAT="2"))
        client = processes[1]
        assert said_by(client) == "ready"
        if asks == "before":
            assert said_by(client) == "waits"
            time.sleep(0.3)  # its request is with the server
        cut(hosts)
        if asks == "after":
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        elapsed, _, error = said_by(client).partition(" ")
        assert "10.213.0.1" in error
        assert 1.0 < float(elapsed) < 6.0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
