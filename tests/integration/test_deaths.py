"""Ranks that are killed: every survivor's error names them, with or without messages between the two."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.processes import DIED, ENDS_ARE_TOLD, caught, run_processes
from support.time_limits import in_time

import dist2
from dist2 import PeerLostError, ProcessGroup

TOLD_S = 1.2
AGAIN_S = 0.5

CALLS: dict[str, Callable[[ProcessGroup], object]] = {
    "broadcast": lambda pg: pg.broadcast(torch.ones(4), 0),
    "reduce": lambda pg: pg.reduce(torch.ones(4), 0),
    "barrier": lambda pg: pg.barrier(),
    "recv": lambda pg: pg.recv(torch.ones(4), (pg.rank() + 1) % 5),
}


def _survive(pg: ProcessGroup, name: str, dying: tuple[int, ...]) -> float:
    """Survive; return the time until the first error. Further deaths are named soon."""
    pg.barrier()
    if pg.rank() in dying:
        time.sleep(0.1)  # the others are inside by now, or done with their part
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()

    def until_told() -> None:
        CALLS[name](pg)
        time.sleep(0.3)  # computing, while others die
        pg.barrier()

    caught(PeerLostError, until_told)
    pending_s = time.monotonic() - start
    while True:  # on a busy machine one of two dies later
        error, next_s = caught(PeerLostError, pg.barrier)
        in_time(next_s, AGAIN_S)
        if error.ranks == dying:
            return pending_s
        in_time(time.monotonic() - start, TOLD_S, error.ranks)
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("name", "dying"), [*((name, (5, 7)) for name in CALLS), ("broadcast", (7,)), ("recv", (7,))]
)
def test_all_survivors_name_all_who_died(
    transport: str, dying: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    results = run_processes(8, _survive, tmp_path, name, dying, transport=transport)
    for rank, result in enumerate(results):
        if rank in dying:
            assert result is DIED
            continue
        in_time(result, TOLD_S, rank)


def _without_the_store(pg: ProcessGroup, transport: str) -> tuple[tuple[int, ...], float, float, float]:
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if pg.rank() == 0 else None
    port = torch.tensor([store.port if store is not None else 0])
    pg.broadcast(port, 0)
    met = store if store is not None else dist2.TCPStore("127.0.0.1", int(port))
    served = dist2.new_group(
        "socket", 20, store=met, rank=pg.rank(), world_size=pg.size(), transport=transport
    )
    served.barrier()
    pg.barrier()
    if pg.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    error, told_s = caught(PeerLostError, served.barrier)
    start = time.monotonic()
    left = served.shrink(timeout=10)
    total = torch.ones(1)
    left.all_reduce(total)
    shrunk_s = time.monotonic() - start
    left.shutdown()
    served.abort()
    return error.ranks, told_s, shrunk_s, total.item()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [3, 4])
def test_survivors_go_on_without_the_store_that_died_with_rank_0(
    size: int, transport: str, tmp_path: Path
) -> None:
    results = run_processes(size, _without_the_store, tmp_path, transport, transport=transport)
    assert results[0] is DIED
    for ranks, told_s, shrunk_s, total in results[1:]:
        assert ranks == (0,)
        in_time(told_s, 1.0)
        in_time(shrunk_s, 2.0)
        assert total == size - 1


ENDS: dict[str, Callable[[], object]] = {
    "exited with code 0": lambda: os._exit(0),
    "exited with code 7": lambda: os._exit(7),
    "was killed by SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "was killed by SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}
NEEDS: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": lambda pg: pg.all_reduce(torch.ones(4)),
    "recv": lambda pg: pg.recv(torch.ones(4), 1),
    "barrier": lambda pg: pg.barrier(),
    "monitored_barrier": lambda pg: pg.monitored_barrier(),
}


def _told_how(pg: ProcessGroup, name: str, end: str) -> tuple[str, int]:
    pids: list[int] = pg.all_gather_object(os.getpid())
    pg.barrier()
    if pg.rank() == 1:
        ENDS[end]()
    error, _ = caught(PeerLostError, lambda: NEEDS[name](pg))
    assert error.ranks == (1,)
    pg.abort()
    return str(error), pids[1]


@pytest.mark.skipif(not ENDS_ARE_TOLD, reason="only the parent of a process knows how it ended")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("name", "end"), list(zip(NEEDS, ENDS, strict=True)))
def test_the_error_says_how_the_process_ended(name: str, end: str, transport: str, tmp_path: Path) -> None:
    told, died = run_processes(2, _told_how, tmp_path, name, end, transport=transport)
    assert died is DIED
    message, pid = told
    assert f"rank 1 (host {socket.gethostname()}, pid {pid})" in message
    assert end in message


def _left(pg: ProcessGroup, how: str) -> tuple[str, float]:
    pg.barrier()
    if pg.rank() == 1:
        pg.shutdown() if how == "left" else pg.abort()
        return "", 0.0
    error, told_s = caught(PeerLostError, pg.monitored_barrier)
    assert error.ranks == (1,)
    pg.abort()
    return str(error), told_s


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["left", "aborted"])
def test_a_monitored_barrier_does_not_wait_for_a_rank_that_left(
    how: str, transport: str, tmp_path: Path
) -> None:
    told = run_processes(2, _left, tmp_path, how, transport=transport)[0]
    assert f"rank 1 {how} the group" in told[0]
    assert "died" not in told[0]
    in_time(told[1], TOLD_S)
