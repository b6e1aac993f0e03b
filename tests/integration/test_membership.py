"""The survivors of killed ranks agree on the lost ones and continue: real processes."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.processes import DIED, caught, hear, run_processes, start, tell
from support.time_limits import in_time

from dist2 import (
    Agreement,
    FileStore,
    GroupRevokedError,
    HashStore,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
    new_group,
)

TRANSPORTS = ("shm", "tcp")
pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def breaks(pg: ProcessGroup) -> PeerLostError:
    """Return the group's error after the death of a rank: in this operation or one of the next."""
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


def test_an_agreement_waits_for_that_of_another_thread_no_longer_than_its_limit(transport: str) -> None:
    with new_group("socket", 30, rank=0, world_size=1, store=HashStore(), transport=transport) as pg:
        with pg._agreeing, pytest.raises(OperationTimeoutError, match=r"agree in group .*another thread"):
            pg.agree(1, timeout=0.1)
        assert pg.agree(1) == Agreement(1, ())
        with pg._agreeing, pytest.raises(OperationTimeoutError, match=r"shrink in group .*another thread"):
            pg.shrink(timeout=0.1)


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
    time.sleep(0.3)
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


def _revoked(pg: ProcessGroup, name: str) -> tuple[GroupRevokedError, float, float, tuple[int, ...]]:
    """Rank 0 revokes a group while the others are in a call on it."""
    part = pg.split(range(pg.size()), name=f"part {name}")
    assert part is not None
    part.barrier()
    if pg.rank() == 0:
        time.sleep(0.1)
        thread = threading.Thread(target=part.revoke)
        thread.start()
        told, elapsed = caught(GroupRevokedError, lambda: part.recv(torch.ones(1), 1))
        thread.join()
        part.revoke()  # again: nothing happens
    else:
        told, elapsed = caught(GroupRevokedError, lambda: CALLS[name](part))
    again, next_s = caught(GroupRevokedError, lambda: part.all_reduce(torch.ones(3)))
    caught(GroupRevokedError, lambda: part.send(torch.ones(3), 0))
    assert isinstance(part.get_error(), GroupRevokedError)
    assert (told.by, again.by, again.group) == (0, 0, f"part {name}")
    assert "was revoked by rank 0" in str(again)
    smaller = part.shrink(timeout=10)
    part.abort()
    left = works(smaller)
    smaller.shutdown()
    return again, elapsed, next_s, left


def _revoked_in_turn(pg: ProcessGroup) -> dict[str, tuple[float, ...]]:
    spent = {}
    for name in CALLS:
        _, *times, left = _revoked(pg, name)
        assert left == (0, 1, 2), name
        spent[name] = tuple(times)
        pg.barrier()  # the parent of the revoked group is unchanged
    return spent


def test_a_revoked_group_frees_all(transport: str, tmp_path: Path) -> None:
    for spent in run_processes(3, _revoked_in_turn, tmp_path, transport=transport):
        for name, (elapsed, next_s) in spent.items():
            in_time(elapsed, 1.2, name)
            in_time(next_s, 0.1, name)


def _revoked_with_a_dead_rank(pg: ProcessGroup) -> tuple[str, float, tuple[int, ...]]:
    pg.barrier()
    if pg.rank() == 2:
        die()
    if pg.rank() == 0:
        time.sleep(0.3)
        pg.revoke()
    start = time.monotonic()
    while not isinstance(pg.get_error(), GroupRevokedError):
        caught(Exception, lambda: pg.recv(torch.ones(1), (pg.rank() + 1) % 2, tag=3))
        in_time(time.monotonic() - start, 3)
        time.sleep(0.01)
    told_s = time.monotonic() - start
    error, _ = caught(GroupRevokedError, lambda: pg.all_reduce(torch.ones(3)))
    return str(error), told_s, works(pg.shrink())


def test_a_group_with_a_dead_rank_can_be_revoked(transport: str, tmp_path: Path) -> None:
    for result in run_processes(4, _revoked_with_a_dead_rank, tmp_path, transport=transport):
        if result is not DIED:
            message, told_s, left = result
            assert "was revoked by rank 0" in message
            in_time(told_s, 1.3)
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


@pytest.mark.parametrize("dying", [{3: 0.2}, {0: 0.2, 1: 0.3}, {0: 0.001, 1: 0.002, 2: 0.003}], ids=str)
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
        hear(pg, "0 gave up", "2 gave up")
        result = pg.agree(0b110)
        pg.barrier()
        return "", (), 0.0, result
    error, elapsed = caught(OperationTimeoutError, lambda: pg.agree(0b011, timeout=0.25))
    tell(pg, f"{pg.rank()} gave up")
    result = pg.agree(0b011)
    pg.barrier()  # the group is as it was
    return str(error), error.missing, elapsed, result


def test_an_agreement_that_times_out_names_who_did_not_come(transport: str, tmp_path: Path) -> None:
    results = run_processes(3, _agree_without_one, tmp_path, transport=transport)
    for rank in (0, 2):
        message, missing, elapsed, result = results[rank]
        assert missing == (1,)
        assert "agree in group 'test': rank 1 did not arrive in time" in message
        assert "(last seen at: rank 1: barrier() #1" in message
        assert elapsed >= 0.25
        in_time(elapsed, 0.45)
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


@pytest.mark.parametrize("order", [[3, 1, 0], [0, 2]], ids=str)
def test_groups_shrink_again_and_again(transport: str, order: list[int], tmp_path: Path) -> None:
    results = run_processes(4, _shrink_again_and_again, tmp_path, order, transport=transport)
    expected, left = [], [0, 1, 2, 3]
    for victim in order:
        left = [rank for rank in left if rank != victim]
        expected.append(tuple(left))
    for rank, result in enumerate(results):
        assert result is DIED if rank in order else result == expected


def _die_in_the_shrink(pg: ProcessGroup, first: int, second: int) -> tuple[int, ...]:
    pids = torch.empty(pg.size(), dtype=torch.int64)
    pg.all_gather_single(pids, torch.tensor([os.getpid()]))
    process = os.pidfd_open(int(pids[second]))
    pg.barrier()
    if pg.rank() == first:
        die()
    breaks(pg)
    if pg.rank() == second:
        threading.Timer(0.01, die).start()
    elif pg.rank() == 3:
        select.select([process], [], [], 20)  # until it is dead: before, none has a decision
    left = pg.shrink()
    return works(left)


@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, 1)])
def test_a_death_during_a_shrink(transport: str, first: int, second: int, tmp_path: Path) -> None:
    results = run_processes(4, _die_in_the_shrink, tmp_path, first, second, transport=transport)
    left = tuple(rank for rank in range(4) if rank not in (first, second))
    assert [results[rank] for rank in left] == [left] * 2


def _shrink_without_who_aborted(pg: ProcessGroup) -> tuple[int, ...]:
    """Rank 1 aborts and goes on with other things, rank 0 closes in good order."""
    pg.barrier()
    if pg.rank() == 1:
        pg.abort()
    if pg.rank() == 0:
        pg.shutdown()
    if pg.rank() < 2:
        return ()
    start = time.monotonic()
    left = works(pg.shrink(timeout=10))
    in_time(time.monotonic() - start, 1.0)
    return left


def test_a_shrink_leaves_out_who_aborted(transport: str, tmp_path: Path) -> None:
    results = run_processes(4, _shrink_without_who_aborted, tmp_path, transport=transport)
    assert results == [(), (), (2, 3), (2, 3)]


def _shrink_after_a_timeout(pg: ProcessGroup) -> tuple[int, ...]:
    pg.barrier()
    if pg.rank() == 1:
        hear(pg, "0 gave up", "2 gave up")
    else:
        caught(OperationTimeoutError, lambda: pg.all_reduce(torch.ones(3), timeout=0.1))
        tell(pg, f"{pg.rank()} gave up")
    # Rank 1 knows nothing of the timeout, and arrives late.
    return works(pg.shrink(timeout=10))


def test_a_shrink_after_a_timeout_leaves_nobody_out(transport: str, tmp_path: Path) -> None:
    assert run_processes(3, _shrink_after_a_timeout, tmp_path, transport=transport) == [(0, 1, 2)] * 3


# Other groups


def _a_death_breaks_its_groups_only(pg: ProcessGroup) -> dict[str, tuple[int, ...]]:
    groups = {str(ranks): pg.split(ranks) for ranks in ([0, 1, 2], [3, 0], [1, 3], [2, 1])}
    mine = {name: group for name, group in groups.items() if group is not None}
    inner = mine["[0, 1, 2]"].split([2, 0]) if "[0, 1, 2]" in mine else None
    pg.barrier()
    if pg.rank() == 3:
        die()
    for name, group in mine.items():
        if "3" in name:
            breaks(group)
    breaks(pg)
    seen = {name: works(group) for name, group in mine.items() if "3" not in name}
    if inner is not None:
        seen["inner"] = works(inner)
    return seen


def test_a_death_breaks_the_groups_of_the_dead_and_no_other(transport: str, tmp_path: Path) -> None:
    results = run_processes(4, _a_death_breaks_its_groups_only, tmp_path, transport=transport)
    assert results[3] is DIED
    assert results[0] == {"[0, 1, 2]": (0, 1, 2), "inner": (2, 0)}
    assert results[1] == {"[0, 1, 2]": (0, 1, 2), "[2, 1]": (2, 1)}
    assert results[2] == {"[0, 1, 2]": (0, 1, 2), "[2, 1]": (2, 1), "inner": (2, 0)}


# Coming back


def joined(pg: ProcessGroup, directory: str, way: str, attempt: int) -> ProcessGroup:
    """Return the group of two survivors and a newcomer."""
    meeting = FileStore(f"{directory}/{attempt}", -1)
    if way == "merge":
        return pg.merge_remote_group(meeting, 3, timeout=20)
    position = pg.rank() if pg.size() == 2 else 2
    meeting.set(f"handle/{position}", pg.handle())
    handles = [meeting.get(f"handle/{each}").decode() for each in range(3)]
    return pg.reconfigure(f"attempt {attempt}", handles, 20)


def _survive_twice(pg: ProcessGroup, directory: str, way: str) -> list[tuple[int, ...]]:
    """Rank 1 is killed, then the process that took its place."""
    seen = []
    for attempt in range(2):
        works(pg)
        if pg.rank() == 1:
            die()
        breaks(pg)
        smaller = pg.shrink(timeout=10)
        seen.append(works(smaller))
        whole = joined(smaller, directory, way, attempt)
        assert whole.rank() < 2  # survivors keep their order, before the newcomer
        again = whole.split([0, 2, 1])
        assert again is not None
        pg = again
    seen.append(works(pg))
    pg.barrier()
    return seen


def _newcomer(directory: str, way: str, attempt: int, transport: str) -> None:
    alone = new_group("socket", 20, store=HashStore(), rank=0, world_size=1, transport=transport)
    whole = joined(alone, directory, way, attempt)
    again = whole.split([0, 2, 1])
    assert again is not None
    works(again)
    if attempt == 0:
        die()
    again.barrier()
    for each in (again, whole, alone):
        each.abort()


@pytest.mark.parametrize("way", ["merge", "reconfigure"])
def test_a_killed_rank_comes_back_twice(transport: str, way: str, tmp_path: Path) -> None:
    directory = tmp_path / "meetings"
    directory.mkdir()
    newcomers = [start(_newcomer, str(directory), way, attempt, transport) for attempt in range(2)]
    try:
        results = run_processes(3, _survive_twice, tmp_path, str(directory), way, transport=transport)
    finally:
        for process in newcomers:
            process.join(5)
            process.kill()
            process.join()
            process.close()
    assert results[1] is DIED
    for rank in (0, 2):
        assert [len(ranks) for ranks in results[rank]] == [2, 2, 3]
