"""A host that vanishes silently: network namespaces with a cut cable."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing import current_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import caught, started
from support.time_limits import in_time

import dist2
from dist2 import PeerLostError
from dist2.errors import StoreConnectionError

HEARTBEAT_S = 3
NUMELS = (4, 4_000_000)
SAYS_S = 20.0
"""Time within which a process sends each awaited answer."""
_CLONE_NEWNET = 0x40000000


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
    """Drop all packets without a notice: the cable's ends stay up."""
    for name in hosts:
        _ip("-n", name, "route", "flush", "dev", "cable")
        _ip("-n", name, "route", "add", "blackhole", "10.213.0.0/24")


@contextmanager
def running_on(
    host: str, body: Callable[..., None], *arguments: object, **variables: str
) -> Iterator[Connection]:
    """Run ``body(pipe, *arguments)`` in a process of a host; yield the other end of the pipe."""
    with started(_enter, (host, variables, body, arguments)) as (pipe,):
        yield pipe


def _enter(
    pipe: Connection,
    host: str,
    variables: dict[str, str],
    body: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    current_process().name = f"on {host}"
    with Path("/run/netns", host).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(variables)
    body(pipe, *arguments)


def said_by(pipe: Connection) -> Any:
    assert pipe.poll(SAYS_S), "it says nothing"
    return pipe.recv()


def _be_rank(pipe: Connection, rank: int, path: Path) -> None:
    """Wait in vain for the other rank, in a group for each length."""
    whole = dist2.new_group("socket", 60, store=dist2.FileStore(str(path), 2), rank=rank, world_size=2)
    whole.barrier()
    pipe.send("ready")
    pipe.recv()
    error, elapsed_s = caught(PeerLostError, lambda: whole.all_reduce(torch.ones(int(path.name))))
    pipe.send((error.ranks, elapsed_s))


def test_a_host_that_vanishes_is_lost_in_the_time_set(hosts: tuple[str, str], tmp_path: Path) -> None:
    """With little or much data in flight: a pair of ranks for each."""
    with ExitStack() as stack:
        pairs = [
            [
                stack.enter_context(
                    running_on(
                        name,
                        _be_rank,
                        rank,
                        tmp_path / str(numel),
                        DIST2_HOST=f"10.213.0.{rank + 1}",
                        DIST2_HEARTBEAT=str(HEARTBEAT_S),
                    )
                )
                for rank, name in enumerate(hosts)
            ]
            for numel in NUMELS
        ]
        for pipe in chain.from_iterable(pairs):
            assert said_by(pipe) == "ready"
        cut(hosts)
        for survivor, _ in pairs:
            survivor.send("go")
        for survivor, _ in pairs:
            lost, elapsed_s = said_by(survivor)
            assert lost == (1,)
            assert elapsed_s > 1.0
            in_time(elapsed_s, HEARTBEAT_S + 1.5)


def _serve(pipe: Connection) -> None:
    store = dist2.TCPStore("10.213.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _ask(pipe: Connection, port: int, first: str) -> None:
    """Wait in vain for a key: from before the cut on, or after it."""
    store = dist2.TCPStore("10.213.0.1", port, timeout=60, wait_for_workers=False)
    pipe.send("ready")
    if first == "cut":
        pipe.recv()
    error, elapsed_s = caught(StoreConnectionError, lambda: store.get("a key that never comes"))
    pipe.send((str(error), elapsed_s))


def test_a_store_whose_host_vanishes_is_lost_in_the_time_set(hosts: tuple[str, str]) -> None:
    """Both if its client waits by then, and if it sends a request only later."""
    with running_on(hosts[0], _serve, DIST2_HEARTBEAT="2") as server, ExitStack() as stack:
        port = said_by(server)
        clients = [
            stack.enter_context(running_on(hosts[1], _ask, port, first, DIST2_HEARTBEAT="2"))
            for first in ("ask", "cut")
        ]
        for client in clients:
            assert said_by(client) == "ready"
        time.sleep(0.3)  # the waiting client's request is with the server
        cut(hosts)
        clients[1].send("go")
        for client in clients:
            error, elapsed_s = said_by(client)
            assert "10.213.0.1" in error
            assert elapsed_s > 1.0
            in_time(elapsed_s, 6.0)
