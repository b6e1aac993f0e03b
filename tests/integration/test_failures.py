"""Errors of survivors after a rank dies, hangs, leaves or calls another operation: real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drill.holdings import segments, segments_since
from support.processes import DIED, caught, run_processes
from support.time_limits import in_time

import dist2
from dist2 import (
    GroupAbortedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
    ReduceOp,
)

TRANSPORTS = ("shm", "tcp")
pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# A rank that dies


def _all_reduce(pg: ProcessGroup, numel: int) -> Callable[[], object]:
    return lambda: pg.all_reduce(torch.ones(numel))


def _async_all_reduce(pg: ProcessGroup, numel: int) -> Callable[[], object]:
    return lambda: pg.all_reduce(torch.ones(numel), async_op=True).wait()


def _recv(pg: ProcessGroup, numel: int) -> Callable[[], object]:
    return lambda: pg.recv(torch.ones(numel), 1)


CALLS = {"sync": _all_reduce, "async": _async_all_reduce, "recv": _recv}


def _survive(pg: ProcessGroup, name: str, numel: int) -> tuple[str, tuple[int, ...], float, float]:
    pg.barrier()
    if pg.rank() == 1:
        time.sleep(0.1)  # the others are inside by now
        die()
    error, pending_s = caught(PeerLostError, CALLS[name](pg, numel))
    again, next_s = caught(PeerLostError, lambda: pg.all_reduce(torch.ones(3)))
    assert again.ranks == error.ranks
    assert isinstance(pg.get_error(), PeerLostError)
    return str(error), error.ranks, pending_s, next_s


@pytest.mark.parametrize(("name", "numel"), [("sync", 4), ("sync", 3_000_000), ("async", 4), ("recv", 4)])
def test_a_death_is_told_to_all_within_a_second(
    transport: str, name: str, numel: int, tmp_path: Path
) -> None:
    results = run_processes(3, _survive, tmp_path, name, numel, transport=transport)
    assert results[1] is DIED
    for rank in (0, 2):
        message, ranks, pending_s, next_s = results[rank]
        assert ranks == (1,), message
        assert "rank 1" in message
        in_time(pending_s, 1.1)
        in_time(next_s, 0.5)


def _die_with_a_child(pg: ProcessGroup, directory: Path) -> tuple[int, ...]:
    """The dying rank leaves a forked worker that holds its sockets until the others have their errors."""
    told = {rank: directory / f"told-{rank}" for rank in (0, 2)}
    pg.barrier()
    if pg.rank() == 1:
        if os.fork() == 0:
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline and not all(path.exists() for path in told.values()):
                time.sleep(0.01)
            os._exit(0)
        die()
    error, elapsed = caught(PeerLostError, lambda: pg.all_reduce(torch.ones(4)))
    told[pg.rank()].touch()
    in_time(elapsed, 1.1)
    ranks: tuple[int, ...] = error.ranks
    return ranks


def test_a_death_shows_though_a_forked_worker_lives_on(transport: str, tmp_path: Path) -> None:
    assert run_processes(3, _die_with_a_child, tmp_path, tmp_path, transport=transport)[::2] == [(1,), (1,)]


def _shrink_after_death(pg: ProcessGroup) -> list[float]:
    pg.barrier()
    if pg.rank() == 1:
        die()
    error, _ = caught(PeerLostError, lambda: pg.all_reduce(torch.ones(4)))
    left = pg.shrink(error.ranks)
    total = torch.full((4,), float(left.rank() + 1))
    left.all_reduce(total)
    big = torch.ones(400_000)
    left.all_reduce(big)
    assert left.global_ranks == (0, 2)
    left.shutdown()
    return [*total.tolist(), big.sum().item() / 400_000]


def test_survivors_go_on_in_a_smaller_group(transport: str, tmp_path: Path) -> None:
    results = run_processes(3, _shrink_after_death, tmp_path, transport=transport)
    assert results[0] == results[2] == [3.0] * 4 + [2.0]


# A rank that does not come


def _absent(pg: ProcessGroup, limit_s: float) -> tuple[float, str, tuple[int, ...]] | None:
    pg.barrier()
    if pg.rank() == 1:
        return None
    error, elapsed = caught(OperationTimeoutError, lambda: pg.all_reduce(torch.ones(4), timeout=limit_s))
    return elapsed, str(error), error.missing


def test_a_timeout_comes_in_time_and_names_the_absent(transport: str, tmp_path: Path) -> None:
    results = run_processes(3, _absent, tmp_path, 0.4, transport=transport)
    for rank in (0, 2):
        elapsed, message, missing = results[rank]
        assert elapsed >= 0.4, message
        in_time(elapsed, 0.55, message)
        assert 1 in missing
        assert "rank" in message and "did not arrive in time" in message
        assert "all_reduce(float32[4], op=sum)" in message


def _slow_but_in_time(pg: ProcessGroup) -> float:
    if pg.rank() == 1:
        time.sleep(0.5)
    total = torch.ones(3)
    pg.all_reduce(total, timeout=5)
    return float(total.sum())


def test_a_slow_rank_is_waited_for(transport: str, tmp_path: Path) -> None:
    assert run_processes(2, _slow_but_in_time, tmp_path, transport=transport) == [6.0, 6.0]


# A rank that calls something else


def _wrong_op(pg: ProcessGroup) -> object:
    return pg.all_reduce(torch.ones(4), ReduceOp.MAX if pg.rank() == 1 else ReduceOp.SUM)


def _wrong_dtype(pg: ProcessGroup) -> object:
    return pg.all_reduce(torch.ones(4, dtype=torch.float64 if pg.rank() == 1 else torch.float32))


def _wrong_shape(pg: ProcessGroup) -> object:
    return pg.all_reduce(torch.ones(5 if pg.rank() == 1 else 4))


def _wrong_root(pg: ProcessGroup) -> object:
    return pg.broadcast(torch.ones(4), 1 if pg.rank() == 1 else 0)


def _wrong_operation(pg: ProcessGroup) -> object:
    return pg.barrier() if pg.rank() == 1 else pg.all_reduce(torch.ones(4))


MISTAKES = {
    "op": (_wrong_op, "op=max"),
    "dtype": (_wrong_dtype, "float64[4]"),
    "shape": (_wrong_shape, "float32[5]"),
    "root": (_wrong_root, "root=1"),
    "operation": (_wrong_operation, "barrier()"),
}


def _mistake(pg: ProcessGroup, name: str) -> tuple[str, dict[int, str], float]:
    pg.barrier()
    call, _ = MISTAKES[name]

    def until_told() -> None:
        # A rank that had finished its part learns at its next operation.
        call(pg)
        time.sleep(0.3)
        pg.barrier()

    error, elapsed = caught(MismatchError, until_told)
    return str(error), error.actual, elapsed


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mismatch_names_both_sides_on_all_ranks(transport: str, name: str, tmp_path: Path) -> None:
    results = run_processes(3, _mistake, tmp_path, name, transport=transport)
    wrong = MISTAKES[name][1]
    for rank, (message, actual, elapsed) in enumerate(results):
        assert wrong in message, message
        assert f"{Path(__file__).name}:" in message  # the line in user code
        assert (1 in actual) == (rank != 1), actual
        in_time(elapsed, 1.5)


def _message_mismatch(pg: ProcessGroup, numel: int) -> str:
    def send_and_go_on() -> None:
        pg.send(torch.ones(numel), 1)
        time.sleep(0.3)
        pg.barrier()

    def receive() -> None:
        pg.recv(torch.ones(numel + 1), 0)
        pg.barrier()

    error, _ = caught(MismatchError, send_and_go_on if pg.rank() == 0 else receive)
    return str(error)


@pytest.mark.parametrize("numel", [4, 200_000])
def test_a_message_of_another_size_is_told_to_both(transport: str, numel: int, tmp_path: Path) -> None:
    for message in run_processes(2, _message_mismatch, tmp_path, numel, transport=transport):
        assert f"send(float32[{numel}]" in message
        assert f"recv(float32[{numel + 1}]" in message


# Abort, interrupt, fork


def _abort_from_a_thread(pg: ProcessGroup) -> float | None:
    pg.barrier()
    if pg.rank() == 1:
        return None
    aborted_at = 0.0

    def abort() -> None:
        nonlocal aborted_at
        aborted_at = time.monotonic()
        pg.abort()

    timer = threading.Timer(0.15, abort)
    timer.start()
    caught(GroupAbortedError, lambda: pg.all_reduce(torch.ones(4)))
    freed_s = time.monotonic() - aborted_at
    timer.join()
    caught(GroupAbortedError, lambda: pg.all_reduce(torch.ones(4)))
    return freed_s


def test_abort_frees_a_blocked_caller(transport: str, tmp_path: Path) -> None:
    freed_s = run_processes(2, _abort_from_a_thread, tmp_path, transport=transport)[0]
    in_time(freed_s, 0.1)


def _interrupted(pg: ProcessGroup) -> float | None:
    pg.barrier()
    if pg.rank() == 1:
        return None
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # that one comes in any step
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.15)
    _, elapsed = caught(KeyboardInterrupt, lambda: pg.all_reduce(torch.ones(4)))
    caught(GroupAbortedError, lambda: pg.all_reduce(torch.ones(4)))
    return elapsed


def test_ctrl_c_raises_at_once(transport: str, tmp_path: Path) -> None:
    elapsed = run_processes(2, _interrupted, tmp_path, transport=transport)[0]
    assert elapsed > 0.1
    in_time(elapsed, 0.35)


def _use_in_a_child(pg: ProcessGroup) -> str:
    pg.barrier()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            pg.all_reduce(torch.ones(3))
        except GroupAbortedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    pg.barrier()
    return said


def test_a_forked_child_is_told_that_the_group_is_not_its_own(transport: str, tmp_path: Path) -> None:
    for said in run_processes(2, _use_in_a_child, tmp_path, transport=transport):
        assert "belongs to the parent process" in said


# Leftovers


def _open_and_close(pg: ProcessGroup) -> tuple[int, int, int, int]:
    def use() -> None:
        groups = [group for group in (pg.split([0, 1], name=f"g{n}") for n in range(40)) if group is not None]
        for group in groups:
            group.all_reduce(torch.ones(3))
            group.all_reduce(torch.ones(3), async_op=True).wait()
        for group in groups:
            group.shutdown()

    use()
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    use()
    pg.barrier()
    return *before, len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def test_groups_give_back_descriptors_and_threads(transport: str, tmp_path: Path) -> None:
    before = segments()
    for fds, threads, fds_after, threads_after in run_processes(
        2, _open_and_close, tmp_path, transport=transport
    ):
        assert fds_after <= fds
        assert threads_after <= threads
    assert not segments_since(before)


def test_a_rank_that_never_comes_is_named(transport: str, tmp_path: Path) -> None:
    store = dist2.FileStore(str(tmp_path / "alone"), 2)
    with pytest.raises(OperationTimeoutError, match=r"rank 1 of 2 did not arrive within 0.3 s") as failure:
        dist2.new_group("socket", 0.3, store=store, rank=0, world_size=2, transport=transport)
    assert failure.value.missing == (1,)
