"""A rank that was stopped while it waited (Ctrl-Z, a suspended job) has the rest of its time afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.processes import run_processes

from dist2 import ProcessGroup

LIMIT_S = 1.5
STOPPED_S = 3.0
MOMENT_S = 0.2


def _all_reduce(pg: ProcessGroup, tensor: torch.Tensor) -> None:
    pg.all_reduce(tensor)


def _all_reduce_async(pg: ProcessGroup, tensor: torch.Tensor) -> None:
    pg.all_reduce(tensor, async_op=True).wait()


def _message(pg: ProcessGroup, tensor: torch.Tensor) -> None:
    if pg.rank():
        pg.send(tensor, 0)
    else:
        pg.recv(tensor, 1)


def _message_async(pg: ProcessGroup, tensor: torch.Tensor) -> None:
    (pg.isend(tensor, 0) if pg.rank() else pg.irecv(tensor, 1)).wait()


def stopped(pg: ProcessGroup, call: Callable[[ProcessGroup, torch.Tensor], None]) -> bool:
    """As rank 1, stop rank 0 in the call for longer than its limit; join the call once it is continued."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    pg.all_gather(pids, torch.tensor([os.getpid()]))
    if pg.rank() == 1:
        other = int(pids[0])
        time.sleep(MOMENT_S)  # it begins to wait
        os.kill(other, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(other, signal.SIGCONT)
        time.sleep(MOMENT_S)  # it looks at the clock
    call(pg, torch.ones(4))
    return True


@pytest.mark.parametrize(
    ("transport", "call"),
    [
        ("shm", _all_reduce),
        ("tcp", _all_reduce_async),
        ("tcp", _message),
        ("shm", _message_async),
    ],
)
def test_a_wait_goes_on_after_a_stop_that_is_longer_than_its_limit(
    transport: str, call: Callable[[ProcessGroup, torch.Tensor], None], tmp_path: Path
) -> None:
    assert run_processes(2, stopped, tmp_path, call, timeout=LIMIT_S, transport=transport) == [True] * 2
