"""Groups on several hosts with several ranks each: results, and failures that reach every rank."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from support.lending_offers import note_offers
from support.oracle import example
from support.ranks import RankFailed, Tenant, run_ranks
from torch.distributed import ReduceOp

from dist2 import GroupAbortedError, MismatchError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.algorithms.hosts import folding_groups
from dist2.backends.socket.borrowing import Borrowed, Borrowing
from dist2.backends.socket.executor import Traffic
from dist2.backends.socket.overlap import Messages

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


@pytest.mark.parametrize("refused", [(), (3,), (0, 1, 2, 3)], ids=str)
def test_ranks_of_all_hosts_lend_their_tensors_or_none_do(
    refused: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = note_offers(monkeypatch)

    def body(pg: ProcessGroup) -> None:
        for _ in range(2):
            everyone = [example((LONG,), torch.float32, rank) for rank in range(pg.size())]
            mine = everyone[pg.rank()].clone()
            pg.all_reduce(mine)
            assert torch.equal(mine, by_host(TWO_BY_TWO.layout, everyone))

    run_ranks(4, body, attrs.evolve(TWO_BY_TWO, refused=refused))
    assert len(offers) == (0 if refused else 2 * 4)


@pytest.mark.parametrize("late", range(4))
def test_memory_that_was_lent_is_its_callers_when_an_operation_fails(late: int) -> None:
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


def test_what_a_rank_reads_of_one_that_has_given_up_goes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank gives up, and its caller continues, while the other rank of its host reads its tensor."""
    lent, back = threading.Event(), threading.Event()
    borrow = Borrowing.borrow
    calls = itertools.count()

    def slowly(self: Borrowing, wanted: Sequence[tuple[int, int]]) -> list[Borrowed]:
        borrowed = borrow(self, wanted)
        if wanted == ((1, 0),) and next(calls):
            lent.set()
            back.wait(20)
        return borrowed

    monkeypatch.setattr(Borrowing, "borrow", slowly)
    sent: list[int] = []
    send = Traffic.start

    def sending(self: Traffic, messages: Messages) -> None:
        if back.is_set():
            sent.extend(message.number for message in messages.sends)
        send(self, messages)

    monkeypatch.setattr(Traffic, "start", sending)

    def body(pg: ProcessGroup) -> None:
        pg.all_reduce(torch.ones(LONG))
        pg.barrier()
        mine = torch.ones(LONG)
        if pg.rank() == 1:
            aborter = threading.Thread(target=lambda: lent.wait(20) and pg.abort())
            aborter.start()
            with pytest.raises(GroupAbortedError):
                pg.all_reduce(mine)
            aborter.join()
            mine.zero_()
            back.set()
            return
        with pytest.raises((PeerLostError, GroupAbortedError)):
            pg.all_reduce(mine)

    run_ranks(4, body, TWO_BY_TWO)
    assert not sent


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
            pg.all_reduce(torch.ones(4), timeout=0.3)
        seen.wait(20)
        if pg.rank() == 2:  # beside it
            assert caught.value.missing == (3,)

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
