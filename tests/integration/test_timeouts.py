"""Timeouts: raised in time, with the missing ranks and the last call of each; and never without cause."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from support.processes import caught, hear, run_processes, tell
from support.time_limits import Late as HeldUp
from support.time_limits import in_time

from dist2 import OperationTimeoutError, PeerLostError, ProcessGroup

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

LIMIT_S = 0.25
LIMIT_SAID, WAITED_SAID = f"limit {LIMIT_S} s", f"waited {LIMIT_S} s"
LATEST_S = 1.1 * LIMIT_S
NOISE_S = 0.2
"""Time that a busy machine may take to run a process that has been woken."""
LONG_S = 20.0
ABSENT = 1


def _wait_behind_what_takes_longer(pg: ProcessGroup) -> float:
    """Wait for operations queued behind a call that the peer joins late; return the time."""
    if pg.rank() == ABSENT:
        pg.recv(torch.empty(1), 0)
        pg.abort()
        return 0.0
    pg.all_reduce(torch.ones(4), async_op=True)
    second = pg.all_reduce(torch.ones(4), async_op=True, timeout=LIMIT_S / 2)
    error, took = caught(OperationTimeoutError, lambda: second.wait(LIMIT_S))
    assert WAITED_SAID in str(error), error
    pg.send(torch.ones(1), ABSENT)
    return took


@attrs.frozen
class Late:
    """A call that one rank does not join.

    Attributes:
        call: The call of the others.
        says: Texts in the message, besides the group.
        limit_s: Timeout of the group.
        usable: Whether the group works afterwards.
        last: The absent rank's last call in the message.
    """

    call: Callable[[ProcessGroup], object]
    says: tuple[str, ...]
    limit_s: float = LIMIT_S
    usable: bool = False
    last: str = "barrier()"


def _short_wait(pg: ProcessGroup) -> None:
    pg.all_reduce(torch.ones(4), async_op=True).wait(LIMIT_S)


CALLS = {
    "of_the_group": Late(
        lambda pg: pg.all_reduce(torch.ones(4)), ("all_reduce(float32[4], op=sum) #2", LIMIT_SAID)
    ),
    "of_the_call": Late(
        lambda pg: pg.all_reduce(torch.ones(4), timeout=LIMIT_S),
        ("all_reduce(float32[4], op=sum) #2", LIMIT_SAID),
        LONG_S,
    ),
    "async": Late(
        lambda pg: pg.all_reduce(torch.ones(4, dtype=torch.int64), async_op=True).wait(),
        ("all_reduce(int64[4], op=sum) #2", LIMIT_SAID),
    ),
    "long": Late(
        lambda pg: pg.all_reduce(torch.ones(3, 200_000)), ("all_reduce(float32[3, 200000], op=sum) #2",)
    ),
    "broadcast": Late(lambda pg: pg.broadcast(torch.ones(2), ABSENT), ("broadcast(float32[2], root=1) #2",)),
    "barrier": Late(lambda pg: pg.barrier(), ("barrier() #2", LIMIT_SAID)),
    "recv": Late(lambda pg: pg.recv(torch.ones(4), ABSENT), ("recv(float32[4]", "peer=1", LIMIT_SAID)),
    "irecv": Late(lambda pg: pg.irecv(torch.ones(4), ABSENT).wait(), ("recv(float32[4]", LIMIT_SAID)),
    "long_send": Late(lambda pg: pg.send(torch.ones(3_000_000), ABSENT), ("send(float32[3000000]", "peer=1")),
    "short_wait": Late(_short_wait, ("all_reduce(float32[4], op=sum) #2", WAITED_SAID), LONG_S, True, ""),
    "agree": Late(lambda pg: pg.agree(timeout=LIMIT_S), ("agree", LIMIT_SAID), LONG_S, True),
    "monitored_barrier": Late(
        lambda pg: pg.monitored_barrier(LIMIT_S), ("monitored_barrier", f"within {LIMIT_S} s"), LONG_S, True
    ),
}


@attrs.frozen
class Answer:
    """A rank's error, and its time."""

    came_s: float
    took_s: float
    message: str
    missing: tuple[int, ...]
    last_seen: dict[int, str]
    usable: bool
    elapsed_s: float | None


def _come_to_all_but_one(pg: ProcessGroup) -> dict[str, Answer]:
    answers = {}
    for name, late in CALLS.items():
        group = pg.split(range(pg.size()), timeout=late.limit_s, name=name)
        assert group is not None
        group.barrier(timeout=LONG_S)
        if pg.rank() != ABSENT:
            came_s = time.monotonic()
            error, took_s = caught(OperationTimeoutError, lambda late=late, group=group: late.call(group))
            answers[name] = Answer(
                came_s,
                took_s,
                str(error),
                error.missing,
                error.last_seen,
                error.group_usable,
                error.elapsed_s,
            )
            assert error.timeout_s == LIMIT_S
            assert error.group == name
        pg.barrier()
        group.abort()
    return answers


def test_a_limit_is_kept_and_tells_what_is_known(transport: str, tmp_path: Path) -> None:
    results = run_processes(3, _come_to_all_but_one, tmp_path, timeout=LONG_S, transport=transport)
    for rank in (0, 2):
        assert results[rank].keys() == CALLS.keys()
        for name, answer in results[rank].items():
            late = CALLS[name]
            whose = results[0][name] if name == "monitored_barrier" else answer  # rank 0 reports first
            assert answer.came_s + answer.took_s >= whose.came_s + LIMIT_S, (name, answer, whose)
            in_time(answer.took_s, LATEST_S + NOISE_S, name, answer)
            assert all(text in answer.message for text in late.says), (name, answer.message)
            assert repr(name) in answer.message or name == "short_wait", answer.message
            assert ABSENT in answer.missing or name == "short_wait", (name, answer)
            assert late.last in answer.last_seen.get(ABSENT, ""), (name, answer)
            assert answer.elapsed_s is None or LIMIT_S <= answer.elapsed_s <= answer.took_s + 0.001


SLOW_S = 0.3


def _slow(pg: ProcessGroup) -> list[float]:
    """One rank after the other arrives late, within the limit, unless something else holds it up as well."""
    try:
        return _sums_of_slow(pg)
    except OperationTimeoutError as error:
        raise HeldUp(str(error)) from error


def _sums_of_slow(pg: ProcessGroup) -> list[float]:
    sums = []
    group = pg.split(range(pg.size()), timeout=SLOW_S / 0.6)
    assert group is not None
    group.barrier()
    peer = (pg.rank() + 1) % pg.size()
    for late in range(pg.size()):
        if pg.rank() == late:
            time.sleep(SLOW_S)
        total = torch.full((3,), 1.0 + pg.rank())
        group.all_reduce(total)
        sums.append(total[0].item())
        group.barrier()
        if pg.rank() == late:
            time.sleep(SLOW_S)
        got = torch.empty(50_000)
        receiving = group.irecv(got, (pg.rank() - 1) % pg.size())
        group.send(torch.full((50_000,), float(pg.rank())), peer)
        receiving.wait()
        sums.append(got[-1].item())
        group.barrier()
    return sums


@pytest.mark.parametrize("world_size", [4])
def test_who_is_slow_is_waited_for(transport: str, world_size: int, tmp_path: Path) -> None:
    results = run_processes(world_size, _slow, tmp_path, timeout=LONG_S, transport=transport)
    total = world_size * (world_size + 1) / 2
    for rank, sums in enumerate(results):
        assert sums == [total, float((rank - 1) % world_size)] * world_size


def _give_up_on_one(pg: ProcessGroup, numel: int) -> tuple[str, float]:
    """Rank 1 arrives late at an operation that rank 0 has given up; return its error, and its delay after
    that."""
    pg.barrier()
    if pg.rank() == 0:
        caught(OperationTimeoutError, lambda: pg.all_reduce(torch.ones(numel), timeout=0.1))
        tell(pg, "gave up")
        time.sleep(0.1)  # rank 1 waits by then, or comes later: it gets the same error
        pg.abort()
        return "", 0.0
    hear(pg, "gave up")
    error, told_s = caught(
        (OperationTimeoutError, PeerLostError), lambda: (pg.all_reduce(torch.ones(numel)), pg.barrier())
    )
    if isinstance(error, PeerLostError):
        assert error.ranks == (0,)
        assert "rank 0 aborted the group (OperationTimeoutError: " in str(error)
        assert "(last seen at: rank 1: barrier() #1" in str(error)
    else:  # it had what it needed of the first operation, and hears in the second one, before the abort
        assert error.missing == (1,)
        assert re.search(
            "rank 0 (has given up \\(OperationTimeoutError: |gave up an earlier operation)", str(error)
        )
    return str(error), told_s


@pytest.mark.parametrize("numel", [4, 3_000_000])
def test_who_comes_after_a_limit_is_told_whose_limit_it_was(
    transport: str, numel: int, tmp_path: Path
) -> None:
    message, told_s = run_processes(2, _give_up_on_one, tmp_path, numel, timeout=LONG_S, transport=transport)[
        1
    ]
    assert "rank 1 did not arrive in time" in message
    in_time(told_s, 1.0)


STOPPED_S = 0.45


def _stop_for_a_while(pg: ProcessGroup, limit_s: float) -> float:
    """Stop rank 1 during many operations, and continue it later; return the total time."""
    size = pg.size()
    pids = torch.empty(size, dtype=torch.int64)
    pg.all_gather_single(pids, torch.tensor([os.getpid()]))
    group = pg.split(range(size), timeout=limit_s)
    assert group is not None
    group.barrier(timeout=LONG_S)
    timers = []
    if pg.rank() == 0:
        for delay_s, number in ((0.05, signal.SIGSTOP), (0.05 + STOPPED_S, signal.SIGCONT)):
            timers.append(threading.Timer(delay_s, os.kill, (int(pids[1]), number)))
            timers[-1].start()
    start = time.monotonic()
    try:
        goes_on = torch.ones(1)
        while goes_on.item():
            _some_work(group)
            goes_on = torch.tensor([float(pg.rank() == 0 and time.monotonic() - start < 0.1 + STOPPED_S)])
            group.broadcast(goes_on, 0)
        return time.monotonic() - start
    finally:
        for timer in timers:
            timer.join()


def _some_work(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    for numel in (3, 300_000):
        total = torch.full((numel,), float(rank))
        reducing = pg.all_reduce(total, async_op=numel > 3)
        got = torch.empty(numel)
        sending = pg.isend(torch.full((numel,), float(rank)), (rank + 1) % size)
        pg.recv(got, (rank - 1) % size)
        sending.wait()
        reducing.wait()
        assert total[-1].item() == size * (size - 1) / 2
        assert got[-1].item() == (rank - 1) % size


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_stopped_process_is_a_straggler(transport: str, world_size: int, tmp_path: Path) -> None:
    for took_s in run_processes(
        world_size, _stop_for_a_while, tmp_path, 5.0, timeout=LONG_S, transport=transport
    ):
        assert took_s > STOPPED_S


def _stop_for_too_long(pg: ProcessGroup) -> tuple[int, ...]:
    """Return the missing ranks; rank 1 may learn that rank 0 gave up before its own timeout."""
    with pytest.raises((OperationTimeoutError, PeerLostError)) as error:
        _stop_for_a_while(pg, 0.2)
    again = pg.split(range(pg.size()))
    assert again is not None
    _some_work(again)  # it has gone on, and is no worse for it
    return error.value.missing if isinstance(error.value, OperationTimeoutError) else ()


def test_a_process_stopped_for_too_long_is_told_from_a_dead_one(transport: str, tmp_path: Path) -> None:
    results = run_processes(2, _stop_for_too_long, tmp_path, timeout=LONG_S, transport=transport)
    assert results[0] == (1,)
    assert results[1] in {(0,), (1,), ()}


def test_a_wait_ends_in_time_also_behind_what_may_take_longer(transport: str, tmp_path: Path) -> None:
    took, _ = run_processes(2, _wait_behind_what_takes_longer, tmp_path, timeout=LONG_S, transport=transport)
    assert took >= LIMIT_S
    in_time(took, LATEST_S + NOISE_S)
