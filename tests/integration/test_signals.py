"""`abort` in a signal handler, at any moment: it never waits for a lock that its own thread holds."""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from drill.holdings import holdings, kept_since
from support.mixed_operations import some_of_everything
from support.processes import caught, run_processes
from support.time_limits import in_time

from dist2 import GroupAbortedError, GroupRevokedError, InvalidUsageError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport.boards.waiting import Waiting

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

LONGEST_S = 0.003
"""Signals come within this time: that of some operations."""


@contextmanager
def soon(handler: Callable[[], object], delay_s: float) -> Iterator[None]:
    """Run a signal handler after a delay, during any work of the main thread; wait for it."""
    came = threading.Event()

    def handle(number: int, frame: object) -> None:
        handler()
        came.set()

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    try:
        yield
        while not came.is_set():
            time.sleep(0.0001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def some_work(pg: ProcessGroup) -> None:
    """Run several kinds of operations; raise the group's error, if there is one."""
    some_of_everything(pg, later_numel=2)
    if (error := pg.get_error()) is not None:  # the signal came just now
        raise error


def _abort_others(pg: ProcessGroup, rounds: int) -> list[str]:
    """Abort an idle group again and again, while the main thread is busy in another."""
    dice = random.Random(pg.rank())
    some_work(pg)
    before = holdings()
    for _ in range(rounds):
        idle = pg.split([0, 1])
        assert idle is not None
        idle.all_reduce(torch.ones(2))
        with soon(idle.abort, dice.uniform(0.0001, LONGEST_S)):
            for _ in range(3):
                some_work(pg)
        with pytest.raises(GroupAbortedError):
            idle.barrier()
    pg.barrier()
    return list(kept_since(before))


def test_another_group_is_aborted_at_any_moment(transport: str, tmp_path: Path) -> None:
    assert run_processes(2, _abort_others, tmp_path, 60, transport=transport) == [[], []]


def _abort_own(pg: ProcessGroup, rounds: int) -> list[float]:
    """Abort the group whose operation the main thread is in; return how long it took to be free each time."""
    dice = random.Random(pg.rank())
    took_s = []
    for _ in range(rounds):
        doomed = pg.split([0, 1])
        assert doomed is not None
        aborted_at = [0.0]

        def abort(doomed: ProcessGroup = doomed, aborted_at: list[float] = aborted_at) -> None:
            aborted_at[0] = time.monotonic()
            doomed.abort()

        with soon(abort, dice.uniform(0.0001, LONGEST_S)):
            try:
                while True:
                    some_work(doomed)
            except GroupAbortedError:
                took_s.append(time.monotonic() - aborted_at[0])
            except PeerLostError:  # the other rank was first
                pass
        with pytest.raises((GroupAbortedError, PeerLostError)):
            doomed.barrier()
        some_work(pg)
    return took_s


def test_the_group_in_use_is_aborted_at_any_moment(transport: str, tmp_path: Path) -> None:
    for took_s in run_processes(2, _abort_own, tmp_path, 50, transport=transport):
        in_time(statistics.median(took_s), 0.1)
        in_time(max(took_s), 1.0)  # also on a busy machine


class NodeGoesAway(Exception):  # noqa: N818 - the program's own
    """The exception of a program's own signal handler."""


WAITS = {Waiting._sleep.__qualname__, "SocketBackend._logged.<locals>.execute"}
"""Where a rank waits until something comes, the second in compiled code: elsewhere it answers a probe."""


def _raise_in_the_midst(pg: ProcessGroup, numel: int) -> str:
    """Rank 1's handler raises in an operation that waits for rank 0; return the error of the others."""

    def go_away(number: int, frame: FrameType | None) -> None:
        if frame is None or frame.f_code.co_qualname not in WAITS:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return
        raise NodeGoesAway("in two minutes")

    tensor = torch.ones(numel)
    pg.barrier()
    start = time.monotonic()
    if pg.rank() == 1:
        signal.signal(signal.SIGALRM, go_away)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(NodeGoesAway):
            pg.all_reduce(tensor)
        told = str(pg.get_error())
    else:
        time.sleep(0.2 if pg.rank() == 0 else 0)  # rank 2 waits, rank 0 computes
        error, _ = caught(GroupRevokedError, lambda: (pg.all_reduce(tensor), pg.barrier()))
        told = str(error)
        assert error.by == 1
    in_time(time.monotonic() - start, 1.1)
    left = pg.split(range(pg.size()))  # no rank is gone
    assert left is not None
    left.barrier()
    left.shutdown()
    return told


@pytest.mark.parametrize("numel", [4, 2_000_000])
def test_what_a_handler_raises_in_an_operation_is_told_to_all(
    transport: str, numel: int, tmp_path: Path
) -> None:
    zero, one, two = run_processes(3, _raise_in_the_midst, tmp_path, numel, transport=transport)
    assert "was interrupted by NodeGoesAway" in one
    for told in (zero, two):
        assert "revoked by rank 1 (NodeGoesAway: in two minutes)" in told


def _call_in_the_midst(pg: ProcessGroup, earlier: int) -> list[str]:
    """Rank 0's handler calls the group during an operation of it; return the handler's errors.

    Args:
        earlier: Calls of the same operation before: the first is planned in Python, later ones may run in C.
    """
    told = []
    for _ in range(earlier):
        pg.all_reduce(torch.ones(1))

    def call() -> None:
        for start in (lambda: pg.all_reduce(torch.ones(2)), lambda: pg.barrier(async_op=True).wait()):
            error, _ = caught(InvalidUsageError, start)
            told.append(str(error))

    pg.barrier()
    if pg.rank() == 0:
        with soon(call, 0.1):
            pg.all_reduce(torch.ones(1))
    else:
        time.sleep(0.3)
        pg.all_reduce(torch.ones(1))
        pg.barrier()  # which was issued in the handler, though not waited for
    total = torch.ones(1)
    pg.all_reduce(total)  # the group is as it was
    assert total.item() == 2.0
    return told


@pytest.mark.parametrize("earlier", [0, 3])
def test_waiting_for_what_the_handler_itself_holds_up_is_refused(
    transport: str, earlier: int, tmp_path: Path
) -> None:
    told, nothing = run_processes(2, _call_in_the_midst, tmp_path, earlier, transport=transport)
    assert not nothing
    for each, op in zip(told, ("all_reduce(float32[2], op=sum)", "barrier()"), strict=True):
        assert op in each
        assert "cannot be waited for here: this thread is in the midst of another operation of group" in each
        assert "async_op=True" in each
