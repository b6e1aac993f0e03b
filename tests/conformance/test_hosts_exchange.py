"""`all_to_all` on several hosts with several ranks each: parts of all lengths, and sizes that differ."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from support.ranks import Tenant, run_ranks

from dist2 import GroupAbortedError, MismatchError, OperationTimeoutError, ProcessGroup

TWO_BY_TWO = Tenant("2+2", "socket", layout=(0, 0, 1, 1))
FOUR = Tenant("2+2+2+2", "socket", layout=(0, 0, 1, 1, 2, 2, 3, 3))
LAYOUTS = (
    TWO_BY_TWO,
    Tenant("dealt", "socket", layout=(0, 1, 0, 1)),
    Tenant("2+1", "socket", layout=(0, 0, 1)),
    Tenant("3+1+2", "socket", layout=(0, 1, 0, 2, 0, 2)),
    FOUR,
)
ON_ALL = pytest.mark.parametrize("tenant", LAYOUTS, ids=str)
LONG = 20_000


def part(src: int, dst: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32) + 1000 * src + dst


def exchange(pg: ProcessGroup, length: Callable[[int, int], int]) -> None:
    """Have each rank send to each as much as a function of both says."""
    me, ranks = pg.rank(), range(pg.size())
    sent, received = [length(me, rank) for rank in ranks], [length(rank, me) for rank in ranks]
    output = torch.zeros(sum(received), dtype=torch.int32)
    whole = torch.cat([part(me, rank, sent[rank]) for rank in ranks])
    for _ in range(2):
        pg.all_to_all_single(output.zero_(), whole, received, sent)
        for rank, got in enumerate(output.split(received)):
            assert torch.equal(got, part(rank, me, received[rank])), (rank, me)


def evenly(src: int, dst: int) -> int:
    return LONG


def unevenly(src: int, dst: int) -> int:
    return (3 * src + 5 * dst) % 4 * LONG + src


def longer(src: int, dst: int) -> int:
    """Longer than what goes without asking, and in part longer than the memory of a ring."""
    return (1 << 19) - 100_000 * ((src + 2 * dst) % 5)


def one_way(src: int, dst: int) -> int:
    """Some send much more to a rank than they receive of it, or only one of both anything."""
    return 1_500_000 if (src, dst) in ((0, 2), (2, 1), (3, 0)) else 20 * LONG * (src < dst)


@ON_ALL
@pytest.mark.parametrize("length", [evenly, unevenly, longer, one_way], ids=lambda each: each.__name__)
def test_parts_of_all_lengths(tenant: Tenant, length: Callable[[int, int], int]) -> None:
    run_ranks(len(tenant.layout), lambda pg: exchange(pg, length), tenant)


def test_one_part_that_is_very_long() -> None:
    run_ranks(3, lambda pg: exchange(pg, lambda src, dst: 4_500_000 * (src + dst == 2)), LAYOUTS[2])


@pytest.mark.parametrize(
    "tenant", [TWO_BY_TWO, Tenant("tcp", "socket", options={"transport": "tcp"})], ids=str
)
@pytest.mark.parametrize(
    ("src", "sent", "expected"),
    [
        (1, LONG, 0),
        (1, 0, LONG),
        (1, 7, 0),
        (1, LONG, 7),
        (1, LONG, LONG + 1),
        (2, LONG, 0),
        (2, LONG, 7),
        (2, 0, 7),
    ],
)
def test_sizes_that_do_not_agree_are_told_on_all_hosts(
    tenant: Tenant, src: int, sent: int, expected: int
) -> None:
    """Rank 0 expects another number of elements than a rank sends, on its own host or on the other."""

    def body(pg: ProcessGroup) -> None:
        given, received = [LONG] * 4, [LONG] * 4
        if pg.rank() == 0:
            received[src] = expected
        if pg.rank() == src:
            given[0] = sent
        input, output = (torch.zeros(sum(each), dtype=torch.int32) for each in (given, received))
        exchange(pg, evenly)
        with pytest.raises(MismatchError) as caught:
            pg.all_to_all_single(output, input, received, given)
            pg.barrier()  # a rank that had all of its part by then gets the error here
        text = str(caught.value)
        assert (
            f"sizes differ: rank {src} sends {4 * sent} bytes to rank 0, which receives {4 * expected}"
            in text
        )

    run_ranks(4, body, tenant)


@pytest.mark.parametrize("late", range(4))
def test_who_does_not_come_is_named_beside_it_and_noticed_elsewhere(late: int) -> None:
    seen = threading.Barrier(4)

    def body(pg: ProcessGroup) -> None:
        exchange(pg, evenly)
        if pg.rank() == late:
            seen.wait(20)
            return
        mine = torch.ones(4 * LONG)
        with pytest.raises(OperationTimeoutError) as caught:
            pg.all_to_all_single(torch.zeros(4 * LONG), mine, timeout=0.3)
        if pg.rank() // 2 == late // 2:
            assert caught.value.missing == (late,)
        seen.wait(20)

    run_ranks(4, body, TWO_BY_TWO)


def test_abort_frees_who_waits_at_the_first_fence() -> None:
    freed = threading.Event()

    def body(pg: ProcessGroup) -> None:
        exchange(pg, evenly)
        if pg.rank() != 0:
            assert freed.wait(20)
            return
        timer = threading.Timer(0.1, pg.abort)
        timer.start()
        with pytest.raises(GroupAbortedError):
            pg.all_to_all_single(torch.zeros(4 * LONG), torch.ones(4 * LONG))
        freed.set()
        timer.join()

    run_ranks(4, body, TWO_BY_TWO)
