"""After a fork: the parent's groups refuse the child, and the child makes its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes

import dist2
from dist2 import GroupAbortedError, ProcessGroup

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

CALLS: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": lambda pg: pg.all_reduce(torch.ones(2)),
    "async": lambda pg: pg.all_reduce(torch.ones(2), async_op=True),
    "barrier": lambda pg: pg.barrier(),
    "monitored_barrier": lambda pg: pg.monitored_barrier(),
    "send": lambda pg: pg.send(torch.ones(2), 1 - pg.rank()),
    "irecv": lambda pg: pg.irecv(torch.ones(2), 1 - pg.rank()),
    "objects": lambda pg: pg.all_gather_object("hello"),
    "split": lambda pg: pg.split([0, 1]),
    "shrink": lambda pg: pg.shrink(),
    "agree": lambda pg: pg.agree(),
    "revoke": lambda pg: pg.revoke(),
    "merge": lambda pg: pg.merge_remote_group(dist2.HashStore(), 3, timeout=1),
}
QUIETLY: dict[str, Callable[[ProcessGroup], object]] = {
    "rank": lambda pg: (pg.rank(), pg.size(), repr(pg)),
    "get_error": lambda pg: pg.get_error(),
    "set_timeout": lambda pg: pg.set_timeout(3),
    "abort": lambda pg: pg.abort(),
    "shutdown": lambda pg: pg.shutdown(),
}


def _try_all(pg: ProcessGroup, pending: dist2.Work) -> dict[str, str]:
    """Use a parent's group in every way; return the error of each, and the total time."""
    said = {}
    calls = {**CALLS, "work": lambda pg: pending.wait(), **QUIETLY}
    for name, call in calls.items():
        try:
            call(pg)
            said[name] = "fine"
        except GroupAbortedError as error:
            said[name] = str(error)
    return said


def _check(said: dict[str, str]) -> None:
    assert said.keys() == {*CALLS, "work", *QUIETLY}
    for name, text in said.items():
        assert text == "fine" if name in QUIETLY else "belongs to the parent process" in text, (name, text)


def _a_group_of_children(path: str, rank: int, transport: str) -> float:
    with dist2.new_group(
        "socket", 10, store=dist2.FileStore(path, 2), rank=rank, world_size=2, transport=transport
    ) as pg:
        total = torch.ones(2)
        pg.all_reduce(total)
        return total[0].item()


def _by_os_fork(pg: ProcessGroup, path: str, transport: str) -> dict[str, Any]:
    pg.barrier()
    pending = pg.irecv(torch.ones(2), 1 - pg.rank())
    busy = threading.Event()
    looking = threading.Thread(target=lambda: [pg.get_error() for _ in iter(busy.is_set, True)])
    looking.start()  # a thread that the child does not have, in the middle of a call
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said: dict[str, Any] = _try_all(pg, pending)
            said["sum"] = _a_group_of_children(path, pg.rank(), transport)
        except BaseException as error:  # noqa: BLE001 - reported to the test
            said = {"raised": repr(error)}
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer: dict[str, Any] = json.loads(pipe.read())
    os.waitpid(pid, 0)
    busy.set()
    looking.join()
    pg.send(torch.ones(2), 1 - pg.rank())
    pending.wait()  # the parent is none the worse for it
    pg.barrier()
    return answer


def test_a_child_is_told_at_once_whatever_it_calls(transport: str, tmp_path: Path) -> None:
    start = time.monotonic()
    for said in run_processes(
        2, _by_os_fork, tmp_path, str(tmp_path / "children"), transport, transport=transport
    ):
        assert said.pop("sum", said) == 2.0
        _check(said)
    assert time.monotonic() - start < 15


def _work(pg: ProcessGroup, pending: dist2.Work, pipe: Any) -> None:
    pipe.send(_try_all(pg, pending))


def _by_multiprocessing(pg: ProcessGroup) -> dict[str, str]:
    pg.barrier()
    pending = pg.all_reduce(torch.ones(2), async_op=True)
    current: Any = multiprocessing.process.current_process()
    current._config["daemon"] = False  # as a rank usually is
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(pg, pg.irecv(torch.ones(2), 1 - pg.rank()), theirs))
    worker.start()
    said: dict[str, str] = ours.recv()
    worker.join()
    assert worker.exitcode == 0
    pending.wait()
    pg.barrier()
    return said


def test_a_worker_is_told(transport: str, tmp_path: Path) -> None:
    for said in run_processes(2, _by_multiprocessing, tmp_path, transport=transport):
        _check(said)
