"""Processes of several ranks: three ranks of which two are threads of one process."""

from __future__ import annotations

import os
import signal
import subprocess
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import extremes
from support.processes import DIED, answers_of, started
from support.threads import ends_of
from support.warm_interpreter import whole_python

import dist2
from dist2 import BackendUnavailableError, PeerLostError, ProcessGroup

NUMEL = 1 << 18


def work(pg: ProcessGroup) -> str:
    rank = pg.rank()
    for numel in (8, NUMEL, 3_000_017):
        mine = torch.full((numel,), rank + 1.0)
        pg.all_reduce(mine)
        assert extremes(mine) == {6.0}
    everyone = [torch.zeros(50_000) for _ in range(3)]
    pg.all_gather(everyone, torch.full((50_000,), float(rank)))
    assert [extremes(each) for each in everyone] == [{0.0}, {1.0}, {2.0}]
    came = torch.zeros(NUMEL)
    receiving = pg.irecv(came, (rank - 1) % 3)
    pg.send(torch.full((NUMEL,), float(rank)), (rank + 1) % 3)
    receiving.wait()
    assert extremes(came) == {float((rank - 1) % 3)}
    for ranks in ([0, 1], [1, 2]):
        pair = pg.split(ranks)
        if pair is not None:
            with pair:
                mine = torch.ones(NUMEL)
                pair.all_reduce(mine)
                assert extremes(mine) == {2.0}
    pg.barrier()
    return "done"


def die(pg: ProcessGroup) -> Any:
    """End the process of ranks 0 and 1; return rank 2's error, and the survivors."""
    mine = torch.ones(8)
    try:
        pg.all_reduce(mine)  # rank 2 may still be in it when its peers die
        if pg.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pg.all_reduce(mine)
    except PeerLostError as error:
        return error.ranks, pg.shrink().size()


def serve(pipe: Connection, ranks: tuple[int, ...], path: str, body: Any, transport: str) -> None:
    def rank_main(rank: int) -> Any:
        store = dist2.FileStore(path, 3)
        with dist2.new_group("socket", 20.0, store=store, rank=rank, world_size=3, transport=transport) as pg:
            return body(pg)

    pipe.send(ends_of(*[lambda rank=rank: rank_main(rank) for rank in ranks]))


def run(body: Any, transport: str, folder: Path) -> list[Any]:
    store = str(folder / "store")
    with started(serve, ((0, 1), store, body, transport), ((2,), store, body, transport)) as pipes:
        return answers_of(pipes)


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_two_of_three_ranks_in_one_process(transport: str, tmp_path: Path) -> None:
    assert run(work, transport, tmp_path) == [["done", "done"], ["done"]]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_process_dies_with_all_its_ranks(transport: str, tmp_path: Path) -> None:
    assert run(die, transport, tmp_path) == [DIED, [((0, 1), 1)]]


def test_inproc_is_for_one_process(tmp_path: Path) -> None:
    for error in chain.from_iterable(run(work, "inproc", tmp_path)):
        assert isinstance(error, BackendUnavailableError | PeerLostError)
        assert "transport='inproc' is for ranks that are threads of one process" in str(error)


PROGRAM = """
import threading, time
import torch, dist2
from observability.metrics import instrument

store, ready = dist2.HashStore(), threading.Barrier(3)

def rank_main(rank):
    pg = dist2.new_group("socket", store=store, rank=rank, world_size=2)
    pg.barrier()
    ready.wait()
    if rank == 0:
        pg.all_reduce(torch.ones(1))

for rank in range(2):
    threading.Thread(target=rank_main, args=(rank,), daemon=True).start()
ready.wait()
# Not while the thread is in torch's C++: Python 3.11 ends it there by unwinding, and C++ aborts.
while not any(each.signature.kind.value == "all_reduce" for each in instrument.in_flight()):
    time.sleep(0.001)
print("the end", flush=True)
"""


def test_a_process_ends_whatever_its_ranks_wait_for() -> None:
    ended = subprocess.run(
        [*whole_python(), "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 0, ended
    assert ended.stdout == "the end\n"
