"""Ranks that make different groups of one group: the errors name the lists of both, or the missing call."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from support.processes import caught
from support.ranks import TENANTS, Tenant, run_ranks
from support.time_limits import in_time

from dist2 import Dist2Error, MismatchError, OperationTimeoutError, ProcessGroup

TIMEOUT_S = 20.0
TOLD_S = 3.0
BY_NAME = {tenant.name: tenant for tenant in TENANTS}
HOSTS = Tenant("hosts", "socket", layout=(0, 1, 1))

USES: dict[str, Callable[[ProcessGroup], object]] = {
    "all_reduce": lambda pg: pg.all_reduce(torch.ones(4)),
    "all_reduce after broadcasts": lambda pg: (
        pg.broadcast(torch.full((4,), float(pg.rank())), 0),
        pg.all_reduce(torch.ones(4)),
    ),
    "recv": lambda pg: pg.recv(torch.ones(4), 1),
}


def _use(pg: ProcessGroup, lists: list[list[int]], use: str) -> tuple[str, float] | None:
    """Make a group of this rank's list, and call something on it that needs the others."""
    ranks = lists[pg.rank()]
    if pg.rank() not in ranks:
        pg.barrier()
        return None
    error, took_s = caught(MismatchError, lambda: _split_and_use(pg, ranks, use))
    pg.barrier()  # the group that is split goes on
    return str(error), took_s


def _split_and_use(pg: ProcessGroup, ranks: list[int], use: str) -> None:
    made = pg.split(ranks)
    assert made is not None
    try:
        USES[use](made)
    finally:
        made.abort()


@pytest.mark.parametrize("tenant", [*TENANTS, HOSTS], ids=str)
@pytest.mark.parametrize("use", USES)
def test_lists_in_another_order_are_told_on_both_ranks(tenant: Tenant, use: str) -> None:
    told = run_ranks(3, lambda pg: _use(pg, [[0, 1], [1, 0], [0, 1]], use), tenant, timeout=TIMEOUT_S)
    for each in told[:2]:
        assert each is not None
        text, took_s = each
        assert "rank 0" in text and "rank 1" in text, text
        assert "with ranks [0, 1]" in text and "with ranks [1, 0]" in text, text
        in_time(took_s, TOLD_S)


@pytest.mark.parametrize("name", ["shm", "tcp", "gloo"])
def test_a_list_with_one_member_more_is_told_on_all_ranks(name: str) -> None:
    lists = [[0, 1, 2], [0, 1], [0, 1, 2]]
    told = run_ranks(3, lambda pg: _use(pg, lists, "all_reduce"), BY_NAME[name], timeout=TIMEOUT_S)
    for each in told:
        assert each is not None
        text, took_s = each
        assert "with ranks [0, 1, 2]" in text and "with ranks [0, 1];" in text.replace(", and", ";"), text
        in_time(took_s, TOLD_S)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_ranks_of_a_subgroup_are_said_to_be_those_of_that_group(name: str) -> None:
    def body(pg: ProcessGroup) -> str:
        tp = pg.split([2, 1], name="tp")
        if tp is None:
            return ""
        error, _ = caught(
            MismatchError, lambda: _split_and_use(tp, [0, 1] if tp.rank() else [1, 0], "all_reduce")
        )
        return str(error)

    for text in run_ranks(3, body, BY_NAME[name], timeout=TIMEOUT_S)[1:]:
        assert "rank 2" in text and "rank 1" in text, text
        assert "with ranks [0, 1] of tp" in text and "with ranks [1, 0] of tp" in text, text


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_rank_that_makes_no_group_is_said_to_have_made_none(name: str) -> None:
    def body(pg: ProcessGroup) -> Dist2Error | None:
        if pg.rank() == 1:  # it takes no part in the split
            caught(Dist2Error, lambda: pg.all_reduce(torch.ones(3)))
            return None
        made = pg.split([0, 1])
        assert made is not None
        error, _ = caught(OperationTimeoutError, lambda: made.all_reduce(torch.ones(4), timeout=2.5))
        pg.abort()
        return error

    error = run_ranks(2, body, BY_NAME[name], timeout=TIMEOUT_S)[0]
    assert "rank 1 did not arrive" in str(error)
    assert "it has not called split or new_group with ranks [0, 1]" in str(error)
    assert "all_reduce(float32[3]" in str(error)  # its call instead


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_groups_that_all_make_in_the_same_order_are_left_alone(name: str) -> None:
    """A rank may be late: it waits in the first group while the others wait in the second one."""

    def late(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            error, _ = caught(OperationTimeoutError, lambda: pg.recv(torch.ones(1), 1, timeout=1.5))
            assert error.missing == (1,)
        made = [pg.split(ranks) for ranks in ([0, 1], [1, 2]) if pg.rank() in ranks]
        for each in made:
            assert each is not None
            each.all_reduce(torch.ones(4))

    run_ranks(3, late, BY_NAME[name], timeout=TIMEOUT_S)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_rank_that_has_closed_a_group_and_waits_in_the_next_is_not_apart(name: str) -> None:
    def body(pg: ProcessGroup) -> float:
        total = torch.zeros(1)
        with pg.split(range(3)) as first:
            if pg.rank() == 0:
                for peer in (1, 2):
                    part = torch.zeros(1)
                    first.recv(part, peer)
                    total += part
            else:
                time.sleep(2.0 * (pg.rank() - 1))  # rank 1 waits in the next group meanwhile, and asks there
                first.send(torch.ones(1), 0)
        with pg.split(range(3)) as second:
            second.all_reduce(total)
        return total.item()

    assert run_ranks(3, body, BY_NAME[name], timeout=TIMEOUT_S) == [2.0] * 3
