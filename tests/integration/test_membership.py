"""Who is left when ranks die, and how the others go on: real processes that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DIED, caught, run_processes

from dist2 import Agreement, GroupRevokedError, OperationTimeoutError, PeerLostError, ProcessGroup

TRANSPORTS = ("shm", "tcp")
pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def breaks(pg: ProcessGroup) -> PeerLostError:
    """Return what the group raises because a rank died: in this operation or one of the next."""
    error, _ = caught(PeerLostError, lambda: [pg.barrier() for _ in range(3)])
    assert isinstance(error, PeerLostError)
    return error


def works(pg: ProcessGroup) -> tuple[int, ...]:
    """Return the members' global ranks, after collectives and messages among them."""
    mine = torch.tensor([float(pg.global_rank())])
    total = mine.clone()
    pg.all_reduce(total)
    assert total.item() == sum(pg.global_ranks)
    big = torch.ones(300_000)
    pg.all_reduce(big)
    assert big.sum().item() == 300_000 * pg.size()
    if pg.size() > 1:
        came = torch.zeros(1)
        sent = pg.isend(mine, (pg.rank() + 1) % pg.size())
        pg.recv(came, (pg.rank() - 1) % pg.size())
        sent.wait()
        assert came.item() == pg.global_ranks[pg.rank() - 1]
    return pg.global_ranks


# Revoke


def _in_all_reduce(pg: ProcessGroup) -> object:
    return pg.all_reduce(torch.ones(4))


def _in_large_all_reduce(pg: ProcessGroup) -> object:
    return pg.all_reduce(torch.ones(2_000_000))


def _in_recv(pg: ProcessGroup) -> object:
    return pg.recv(torch.ones(4), 0, tag=7)


def _in_recv_any(pg: ProcessGroup) -> object:
    return pg.recv(torch.ones(4), None, tag=7)


def _in_async_op(pg: ProcessGroup) -> object:
    return pg.all_reduce(torch.ones(4), async_op=True).wait()


def _in_async_recv(pg: ProcessGroup) -> object:
    return pg.irecv(torch.ones(4), 0, tag=7).wait()


def _computes(pg: ProcessGroup) -> object:
    time.sleep(0.5)
    return pg.barrier()


CALLS: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": _in_all_reduce,
    "large": _in_large_all_reduce,
    "recv": _in_recv,
    "recv any": _in_recv_any,
    "async": _in_async_op,
    "irecv": _in_async_recv,
    "computes": _computes,
}


def _revoked(pg: ProcessGroup, name: str, death: bool) -> dict[str, Any] | None:
    """Rank 0 revokes while the others are in a call; where there is a death, rank 1 is it."""
    part = pg.split(range(pg.size()))
    assert part is not None
    part.barrier()
    if death and pg.rank() == 1:
        die()
    if death:
        breaks(part)
        part = part.shrink([1])
        part = part.split(range(part.size()))
    if pg.rank() == 0:
        time.sleep(0.2)
        threading.Thread(target=part.revoke).start()
        caught(GroupRevokedError, lambda: part.recv(torch.ones(1), 1))
        part.revoke()
        elapsed, told = 0.0, part.get_error()
    else:
        told, elapsed = caught(GroupRevokedError, lambda: CALLS[name](part))
    again, next_s = caught(GroupRevokedError, lambda: part.all_reduce(torch.ones(3)))
    caught(GroupRevokedError, lambda: part.send(torch.ones(3), 0))
    assert isinstance(part.get_error(), GroupRevokedError)
    left = part.shrink(timeout=10)
    return {
        "by": (told.by, again.by),
        "text": str(again),
        "s": (elapsed, next_s),
        "left": works(left),
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_revoked_group_frees_all(transport: str, name: str, tmp_path: Path) -> None:
    results = run_processes(3, _revoked, tmp_path, name, False, transport=transport)
    for result in results:
        assert result["by"] == (0, 0)
        assert "was revoked by rank 0" in result["text"]
        assert result["s"][0] < 1.2
        assert result["s"][1] < 0.1
        assert result["left"] == (0, 1, 2)


def _revoked_with_a_dead_rank(pg: ProcessGroup) -> tuple[str, float, tuple[int, ...]]:
    pg.barrier()
    if pg.rank() == 2:
        die()
    if pg.rank() == 0:
        time.sleep(0.3)
        pg.revoke()
    start = time.monotonic()
    while not isinstance(pg.get_error(), GroupRevokedError):
        caught(Exception, lambda: pg.recv(torch.ones(1), (pg.rank() + 1) % 2, tag=3))  # type: ignore[arg-type]
        assert time.monotonic() - start < 3
        time.sleep(0.01)
    told_s = time.monotonic() - start
    error, _ = caught(GroupRevokedError, lambda: pg.all_reduce(torch.ones(3)))
    return str(error), told_s, works(pg.shrink())


def test_a_group_with_a_dead_rank_can_be_revoked(transport: str, tmp_path: Path) -> None:
    for result in run_processes(4, _revoked_with_a_dead_rank, tmp_path, transport=transport):
        if result is not DIED:
            message, told_s, left = result
            assert "was revoked by rank 0" in message
            assert told_s < 1.3
            assert left == (0, 1, 3)


# Agree


def _agree_with_deaths(pg: ProcessGroup, dying: dict[int, float], flags: int) -> list[Agreement]:
    """Ranks die at a time after the others have begun to agree."""
    pg.barrier()
    if pg.rank() in dying:
        threading.Timer(dying[pg.rank()], die).start()
        time.sleep(dying[pg.rank()] / 2)
        if dying[pg.rank()] > 0.1:
            time.sleep(30)
    mine = flags & ~(1 << pg.rank())
    return [pg.agree(mine), pg.agree(-1)]


@pytest.mark.parametrize(
    "dying", [{}, {0: 0.2}, {3: 0.2}, {0: 0.2, 1: 0.3}, {0: 0.001, 1: 0.002, 2: 0.003}], ids=str
)
def test_survivors_agree_though_ranks_die_meanwhile(
    transport: str, dying: dict[int, float], tmp_path: Path
) -> None:
    results = run_processes(5, _agree_with_deaths, tmp_path, dying, 0b111111, transport=transport)
    alive = [result for rank, result in enumerate(results) if rank not in dying]
    assert len({repr(result) for result in alive}) == 1, alive
    first, second = alive[0]
    survivors = sum(1 << rank for rank in range(5) if rank not in dying)
    assert first.flags & survivors == 0
    assert first.flags & 0b100000
    assert set(first.failed) <= set(second.failed) <= set(dying)


def _agree_without_one(pg: ProcessGroup) -> tuple[str, tuple[int, ...], float, Agreement]:
    pg.barrier()
    if pg.rank() == 1:
        time.sleep(1.0)
        result = pg.agree(0b110)
        pg.barrier()
        return "", (), 0.0, result
    error, elapsed = caught(OperationTimeoutError, lambda: pg.agree(0b011, timeout=0.4))
    result = pg.agree(0b011)
    pg.barrier()  # the group is as it was
    return str(error), error.missing, elapsed, result


def test_an_agreement_that_times_out_names_who_did_not_come(transport: str, tmp_path: Path) -> None:
    results = run_processes(3, _agree_without_one, tmp_path, transport=transport)
    for rank in (0, 2):
        message, missing, elapsed, result = results[rank]
        assert missing == (1,)
        assert "agree in group 'test': rank(s) 1 did not come" in message
        assert 0.4 <= elapsed < 0.6
        assert result == results[1][3] == Agreement(0b010, ())


# Shrink


def _shrink_again_and_again(pg: ProcessGroup, order: list[int]) -> list[tuple[int, ...]]:
    group, seen = pg, []
    for victim in order:
        works(group)
        if group.global_rank() == victim:
            die()
        breaks(group)
        group = group.shrink()
        seen.append(works(group))
    return seen


@pytest.mark.parametrize("order", [[0, 3], [1, 2], [3, 2, 1], [2, 0, 1]], ids=str)
def test_groups_shrink_again_and_again(transport: str, order: list[int], tmp_path: Path) -> None:
    results = run_processes(4, _shrink_again_and_again, tmp_path, order, transport=transport)
    expected, left = [], [0, 1, 2, 3]
    for victim in order:
        left = [rank for rank in left if rank != victim]
        expected.append(tuple(left))
    for rank, result in enumerate(results):
        assert result is DIED if rank in order else result == expected


def _die_in_the_shrink(pg: ProcessGroup, first: int, second: int) -> tuple[int, ...]:
    pg.barrier()
    if pg.rank() == first:
        die()
    breaks(pg)
    if pg.rank() == second:
        threading.Timer(0.01, die).start()
    elif pg.rank() == 3:
        time.sleep(0.1)  # until then none has a decision
    left = pg.shrink()
    return works(left)


@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, 1), (0, 2)])
def test_a_death_during_a_shrink(transport: str, first: int, second: int, tmp_path: Path) -> None:
    results = run_processes(4, _die_in_the_shrink, tmp_path, first, second, transport=transport)
    left = tuple(rank for rank in range(4) if rank not in (first, second))
    assert [results[rank] for rank in left] == [left] * 2
