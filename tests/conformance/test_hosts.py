"""Groups on several hosts with several ranks each: results, and failures that reach every rank."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
import torch
from support.oracle import example
from support.ranks import RankFailed, Tenant, run_ranks
from torch.distributed import ReduceOp

from dist2 import GroupAbortedError, MismatchError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.algorithms.hosts import folding_groups

TWO_BY_TWO = Tenant("2+2", "socket", layout=(0, 0, 1, 1))
LAYOUTS = (
    TWO_BY_TWO,
    Tenant("dealt", "socket", layout=(0, 1, 0, 1)),
    Tenant("2+1", "socket", layout=(0, 0, 1)),
)
ON_ALL = pytest.mark.parametrize("tenant", LAYOUTS, ids=str)
LONG = 3_000_000
"""Elements of a vector that takes several passes through the slots."""


def by_host(layout: tuple[int, ...], everyone: list[torch.Tensor]) -> torch.Tensor:
    """Add up each host in rank order, then the hosts, as plainly as can be."""
    partials = []
    for ranks in folding_groups(layout, len(layout)):
        partial = everyone[ranks[0]].clone()
        for rank in ranks[1:]:
            partial += everyone[rank]
        partials.append(partial)
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


@ON_ALL
def test_sums_are_by_host_and_then_of_hosts(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        backend: Any = pg.backend
        assert backend.layout == tenant.layout
        for numel in (1, 1000, LONG):
            everyone = [example((numel,), torch.float32, rank) for rank in range(pg.size())]
            mine = everyone[pg.rank()].clone()
            pg.all_reduce(mine)
            assert torch.equal(mine, by_host(tenant.layout, everyone))

    run_ranks(len(tenant.layout), body, tenant)


@ON_ALL
def test_long_vectors_through_every_hierarchical_operation(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        me, size = pg.rank(), pg.size()
        base = torch.arange(LONG, dtype=torch.int32) % 1000
        mine, total = base + me, size * base + sum(range(size))
        for root in range(size):
            given = mine.clone()
            pg.broadcast(given, root)
            assert torch.equal(given, base + root)
            summed = mine.clone()
            pg.reduce(summed, root)
            assert torch.equal(summed, total if me == root else mine)
        part = torch.zeros(LONG // size, dtype=torch.int32)
        whole = mine[: LONG // size * size]
        pg.reduce_scatter_single(part, whole)
        start = me * part.numel()
        assert torch.equal(part, total[start : start + part.numel()])
        gathered = torch.zeros(size * LONG, dtype=torch.int32)
        gathered[me * LONG : (me + 1) * LONG] = mine
        pg.all_gather_single(gathered, gathered[me * LONG : (me + 1) * LONG])  # in place
        assert torch.equal(gathered.view(size, LONG), base + torch.arange(size, dtype=torch.int32)[:, None])

    run_ranks(len(tenant.layout), body, tenant)


def test_asynchronous_operations_and_parts_of_the_group() -> None:
    def body(pg: ProcessGroup) -> None:
        tensors = [torch.full((50_000,), float(number)) for number in range(8)]
        works = [pg.all_reduce(tensor, async_op=True) for tensor in tensors]
        pair = pg.split([1, 2] if pg.rank() in (1, 2) else [0, 3])
        assert pair is not None
        token = torch.ones(3)
        pair.all_reduce(token, ReduceOp.SUM)
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, 4.0 * number))
        assert torch.equal(token, torch.full((3,), 2.0))
        pair.shutdown()

    run_ranks(4, body, TWO_BY_TWO)


@pytest.mark.parametrize("late", range(4))
def test_memory_is_its_callers_when_an_operation_has_failed(late: int) -> None:
    """One rank comes after the others have given up: it must use none of their memory."""
    gave_up = threading.Barrier(4)

    def body(pg: ProcessGroup) -> None:
        pg.all_reduce(torch.ones(LONG))
        mine = torch.ones(LONG)
        if pg.rank() == late:
            gave_up.wait(20)
            with pytest.raises((PeerLostError, OperationTimeoutError, GroupAbortedError)):
                pg.all_reduce(mine, timeout=0.5)
            gave_up.wait(20)
            return
        with pytest.raises((OperationTimeoutError, PeerLostError)):
            pg.all_reduce(mine, timeout=0.3)
        mine.zero_()
        gave_up.wait(20)
        gave_up.wait(20)
        assert not mine.any()

    run_ranks(4, body, TWO_BY_TWO)


@pytest.mark.parametrize("odd", range(4))
def test_a_mismatch_on_one_host_is_raised_on_all(odd: int) -> None:
    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        with pytest.raises(MismatchError) as caught:
            pg.all_reduce(torch.ones(5 if pg.rank() == odd else 4))
        assert "float32[5]" in str(caught.value)

    run_ranks(4, body, TWO_BY_TWO)


def test_a_rank_that_does_not_come_is_a_timeout_on_both_hosts() -> None:
    seen = threading.Barrier(4)

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 3:
            seen.wait(20)
            return
        with pytest.raises(OperationTimeoutError) as caught:
            pg.all_reduce(torch.ones(4), timeout=1.0)
        seen.wait(20)
        # Also where it awaits a rank of its own host that has called and waits for the other host.
        assert caught.value.missing == (3,), caught.value

    run_ranks(4, body, TWO_BY_TWO)


def test_a_rank_that_leaves_is_noticed_on_both_hosts() -> None:
    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 3:
            pg.shutdown()
            return
        with pytest.raises(PeerLostError):
            pg.all_reduce(torch.ones(100_000), timeout=15)

    run_ranks(4, body, TWO_BY_TWO)


def test_abort_frees_who_waits_inside_the_host() -> None:
    freed = threading.Event()

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() != 0:
            assert freed.wait(20)
            return
        timer = threading.Timer(0.1, pg.abort)
        timer.start()
        with pytest.raises(GroupAbortedError):
            pg.all_reduce(torch.ones(4))
        freed.set()
        timer.join()

    run_ranks(4, body, TWO_BY_TWO)


def test_shared_memory_alone_is_refused_on_two_hosts() -> None:
    tenant = attrs.evolve(TWO_BY_TWO, options={"transport": "shm"})
    with pytest.raises(RankFailed, match="transport='shm' needs all ranks on one host"):
        run_ranks(4, lambda pg: None, tenant)


@ON_ALL
def test_all_hear_of_a_rank_that_will_not_make_the_group(tenant: Tenant) -> None:
    """Sums of one element are exchanged by one rank of each host; the others wait for that one alone."""
    last = len(tenant.layout) - 1

    def body(pg: ProcessGroup) -> None:
        whole = pg.split(range(pg.size()))
        pg.barrier()
        if pg.rank() == last:
            whole.abort()
        else:
            made = whole.split(range(pg.size()))
            with pytest.raises(PeerLostError, match="has not called split") as caught:
                made.all_reduce(torch.ones(1))
            assert caught.value.ranks == (last,)
        pg.barrier()

    run_ranks(len(tenant.layout), body, tenant)
