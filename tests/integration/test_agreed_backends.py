"""Ranks that are killed in groups of Gloo and of plugins: survivors name them, and go on. Real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.processes import DIED, caught, run_processes
from support.time_limits import in_time
from support.torch_plugins import KINDS

import dist2
from dist2 import PeerLostError, ProcessGroup

TOLD_S = 1.5
BACKENDS = ("gloo", "compiled", "store")
assert set(BACKENDS) - {"gloo"} <= set(KINDS)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _survive(pg: ProcessGroup, numel: int) -> tuple[tuple[int, ...], float, float]:
    pg.barrier()
    if pg.rank() == 1:
        if numel == 1:
            time.sleep(0.1)  # the others wait for this rank's call
            _die()
        threading.Timer(0.02, _die).start()  # inside the library
    start = time.monotonic()

    def until_told() -> None:
        while True:
            pg.all_reduce(torch.ones(numel))

    error, _ = caught(PeerLostError, until_told)
    told_s = time.monotonic() - start
    with pg.shrink(timeout=10) as left:
        left.all_reduce(total := torch.ones(1))
    return error.ranks, told_s, total.item()


@pytest.mark.parametrize("numel", [1, 1 << 22])
@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_name_the_dead_rank_and_go_on(backend: str, numel: int, tmp_path: Path) -> None:
    results = run_processes(3, _survive, tmp_path, numel, backend=backend)
    assert results[1] is DIED
    for rank in (0, 2):
        ranks, told_s, total = results[rank]
        assert ranks == (1,)
        assert total == 2.0
        if numel == 1:
            in_time(told_s, TOLD_S, rank)


def _wait_for_a_message(pg: ProcessGroup) -> tuple[tuple[int, ...], float]:
    pg.barrier()
    if pg.rank() == 1:
        time.sleep(0.1)
        _die()
    wait = pg.irecv(torch.ones(2), 1).wait if pg.rank() else lambda: pg.recv(torch.ones(2), 1)
    error, told_s = caught(PeerLostError, wait)
    return error.ranks, told_s


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receive_from_a_dead_rank_ends(backend: str, tmp_path: Path) -> None:
    results = run_processes(3, _wait_for_a_message, tmp_path, backend=backend)
    assert results[1] is DIED
    for rank in (0, 2):
        ranks, told_s = results[rank]
        assert ranks == (1,)
        in_time(told_s, TOLD_S, rank)


def _without_the_store(pg: ProcessGroup, backend: str) -> tuple[tuple[int, ...], float]:
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if pg.rank() == 0 else None
    port = torch.tensor([store.port if store is not None else 0])
    pg.broadcast(port, 0)
    met = store if store is not None else dist2.TCPStore("127.0.0.1", int(port))
    served = dist2.new_group(backend, 20, store=met, rank=pg.rank(), world_size=pg.size())
    served.barrier()
    pg.barrier()
    if pg.rank() == 0:
        _die()
    error, _ = caught(PeerLostError, served.barrier)
    with served.shrink(timeout=10) as left:
        left.all_reduce(total := torch.ones(1))
    served.abort()
    return error.ranks, total.item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_go_on_without_the_store_that_died_with_rank_0(backend: str, tmp_path: Path) -> None:
    results = run_processes(3, _without_the_store, tmp_path, backend)
    assert results == [DIED, ((0,), 2.0), ((0,), 2.0)]
