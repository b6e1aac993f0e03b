"""An abort reaches all members, also those that do not communicate with the aborting rank."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.processes import caught, run_processes
from support.time_limits import in_time

from dist2 import GroupAbortedError, PeerLostError, PrefixStore, ProcessGroup

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

ABSENT, GONE = 2, 3
TOLD_S = 1.0


def _recv(pg: ProcessGroup) -> object:
    return pg.recv(torch.ones(2), ABSENT)


def _broadcast(pg: ProcessGroup) -> object:
    return pg.broadcast(torch.ones(2), ABSENT)


def _long_all_gather(pg: ProcessGroup) -> object:
    return pg.all_gather_single(torch.ones(800_000), torch.ones(200_000))


CALLS = {
    "recv": _recv,
    "broadcast": _broadcast,
    "long_all_gather": _long_all_gather,
}
COMES_LATE: dict[str, Callable[[ProcessGroup], object]] = {
    "recv": lambda pg: pg.send(torch.ones(2), 0),
}


def _wait_for_the_absent(pg: ProcessGroup, name: str) -> tuple[float, tuple[int, ...]] | None:
    """Rank 2 does not come, the others wait for it; rank 3 aborts, and no rank needs it meanwhile."""
    pg.barrier()
    start = time.monotonic()
    if pg.rank() == GONE:
        time.sleep(0.1)  # the others are inside by now
        pg.abort()
        return None
    if pg.rank() == ABSENT:
        time.sleep(0.5)  # computing: links are read now and then, and the abort arrives meanwhile
        error, _ = caught(PeerLostError, lambda: COMES_LATE.get(name, CALLS[name])(pg))
    else:
        error, _ = caught(PeerLostError, lambda: CALLS[name](pg))
    told_s = time.monotonic() - start - 0.1
    caught(PeerLostError, lambda: pg.all_reduce(torch.ones(2)))
    left = pg.shrink()
    total = torch.ones(1)
    left.all_reduce(total)
    assert total.item() == 3
    left.barrier()
    left.shutdown()
    return told_s, error.ranks


@pytest.mark.parametrize("name", CALLS)
def test_an_abort_is_heard_by_all(transport: str, name: str, tmp_path: Path) -> None:
    results = run_processes(4, _wait_for_the_absent, tmp_path, name, transport=transport)
    for answer in results[:GONE]:
        told_s, ranks = answer
        assert ranks == (GONE,)
        in_time(told_s, TOLD_S)


def _end_well(pg: ProcessGroup) -> float:
    """The root does its part and aborts: the others have all they need."""
    pg.barrier()
    got = torch.full((2,), float(pg.rank()))
    pg.broadcast(got, 0)
    if pg.rank() == 0:
        pg.abort()
    return got[0].item()


def test_what_the_aborting_rank_has_done_its_part_of_ends_well(transport: str, tmp_path: Path) -> None:
    assert run_processes(4, _end_well, tmp_path, transport=transport) == [0.0] * 4


WAITS: dict[str, Callable[[ProcessGroup], object]] = {
    "agree": lambda pg: pg.agree(),
    "shrink": lambda pg: pg.shrink(),
    "monitored_barrier": lambda pg: pg.monitored_barrier(),
    "merge_remote_group": lambda pg: pg.merge_remote_group(PrefixStore("merge", pg.spec.store), 3),
}


def _free_who_waits(pg: ProcessGroup) -> dict[str, float]:
    """Abort each call in which rank 0 waits for rank 1; return the time until each was free."""
    took_s = {}
    for name, call in WAITS.items():
        group = pg.split([0, 1], name=name)
        assert group is not None
        group.barrier()
        if pg.rank() == 0:
            took_s[name] = _free_from(group, call)
        pg.barrier()
        group.abort()
    return took_s


def _free_from(group: ProcessGroup, call: Callable[[ProcessGroup], object]) -> float:
    """Abort a group while this rank waits in it; return how long it took to be free."""
    aborted: list[float] = []
    timer = threading.Timer(0.1, lambda: (aborted.append(time.monotonic()), group.abort()))
    timer.start()
    caught(GroupAbortedError, lambda: call(group))
    freed = time.monotonic()
    timer.join()
    return freed - aborted[0]


def test_an_abort_frees_whatever_waits_here(transport: str, tmp_path: Path) -> None:
    took_s, _ = run_processes(2, _free_who_waits, tmp_path, transport=transport)
    assert took_s.keys() == WAITS.keys()
    in_time(max(took_s.values()), 0.1, took_s)


def _interrupted(pg: ProcessGroup) -> float:
    """Ctrl-C on rank 1: it has aborted the group without a call of `abort`."""
    pg.barrier()

    def call() -> None:
        pg.all_reduce(torch.ones(2))

    if pg.rank() == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        _, elapsed_s = caught(KeyboardInterrupt, call)
        caught(GroupAbortedError, call)
        return elapsed_s
    if pg.rank() == 2:
        time.sleep(0.3)
    error, elapsed_s = caught(PeerLostError, lambda: (call(), call()))  # the first had come to all
    assert error.ranks == (1,)
    return elapsed_s


def test_the_others_hear_of_ctrl_c(transport: str, tmp_path: Path) -> None:
    for elapsed_s in run_processes(3, _interrupted, tmp_path, transport=transport):
        in_time(elapsed_s, TOLD_S)
