"""Groups apart from data: splitting, shrinking, merging, ending, many threads at once."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from support.oracle import example, reduced
from support.ranks import TENANTS, Tenant, run_ranks
from support.threads import together
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]  # not in torch's stubs

import dist2
from dist2 import (
    GroupAbortedError,
    HashStore,
    InvalidUsageError,
    OperationTimeoutError,
    ProcessGroup,
    ReduceOp,
    functional,
    legacy,
    process_group,
)
from dist2.operation.kinds import Reduction

pytestmark = pytest.mark.parametrize("tenant", TENANTS, ids=str)


def total(pg: ProcessGroup | None) -> float | None:
    """Return the sum of the members' global ranks, by an all_reduce."""
    if pg is None:
        return None
    mine = torch.tensor([float(pg.global_rank())])
    pg.all_reduce(mine)
    return mine.item()


# Splits


def test_splits_nest_overlap_and_reorder(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> list[Any]:
        left, right, ends, twisted = (
            pg.split(ranks) for ranks in ([0, 1, 2], [1, 2, 3], [0, 3], [3, 1])
        )  # a rank is in several at a time
        inner = left.split([2, 0]) if left is not None else None
        sums = [total(each) for each in (left, right, ends, twisted, inner)]
        if twisted is not None:
            assert twisted.global_ranks == (3, 1)
            assert twisted.rank() == {3: 0, 1: 1}[pg.rank()]
            assert twisted.group_rank(pg.rank()) == twisted.rank()
            assert twisted.global_rank(0) == 3
            with pytest.raises(InvalidUsageError, match="global_rank 2 is not in group"):
                twisted.group_rank(2)
        if inner is not None:
            assert inner.global_ranks == (2, 0)
            assert inner.group_name.startswith(left.group_name)
        for each in (inner, twisted, ends, right, left):
            if each is not None:
                each.shutdown()
        pg.barrier()
        return sums

    results = run_ranks(4, body, tenant)
    members = ((0, 1, 2), (1, 2, 3), (0, 3), (1, 3), (0, 2))
    for rank, sums in enumerate(results):
        assert sums == [float(sum(each)) if rank in each else None for each in members]


def test_the_same_split_twice_makes_two_groups(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        one, two = pg.split([0, 1]), pg.split([0, 1], name="second", desc="mine", timeout=7)
        assert one.info.uid != two.info.uid
        assert (two.group_name, two.group_desc, two.timeout_s) == ("second", "mine", 7.0)
        for each in (two, one, two, pg):
            assert total(each) == 1.0
        one.shutdown()
        assert total(two) == 1.0
        two.shutdown()

    run_ranks(2, body, tenant)


def test_split_by_color_and_key(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> tuple[int, ...] | None:
        me = pg.rank()
        part = pg.split_by(None if me == 1 else me % 2 - 5, key=-me)
        assert pg.split_by(None) is None
        return None if part is None else (int(total(part)), *part.global_ranks)

    assert run_ranks(4, body, tenant) == [(2, 2, 0), None, (2, 2, 0), (3, 3)]


BAD_SPLITS: dict[str, tuple[Callable[[ProcessGroup], object], str]] = {
    "out of range": (lambda pg: pg.split([0, 7]), r"ranks\[1\] must be .* got 7"),
    "twice": (lambda pg: pg.split([1, 1]), r"ranks names a rank twice: \[1, 1\]"),
    "empty": (lambda pg: pg.split([]), r"ranks must be a non-empty list .* got \[\]"),
    "no list": (lambda pg: pg.split(1), "ranks must be .* got 1"),
    "timeout": (lambda pg: pg.split([0, 1], timeout=-1), "timeout must be positive, got -1"),
    "name": (lambda pg: pg.split([0, 1], name=5), r"name must be a str, got 5 \(int\)"),
    "unwritable name": (lambda pg: pg.split([0, 1], name="\ud800"), "name cannot be written as UTF-8"),
    "desc": (lambda pg: pg.split_by(0, desc=b"x"), r"desc must be a str, got b'x' \(bytes\)"),
    "name of a merge": (lambda pg: pg.merge_remote_group(HashStore(), 2, 9, 5), "group_name must be a str"),
    "store of a merge": (lambda pg: pg.merge_remote_group("x", 2), r"store must be .* got 'x' \(str\)"),
    "name of survivors": (lambda pg: pg.shrink(name=5), "name must be a str"),
    "color": (lambda pg: pg.split_by("red"), "color must be .* got 'red'"),
    "key": (lambda pg: pg.split_by(0, key=1 << 62), "key must be "),
    "no key": (lambda pg: pg.split_by(0, key=None), "key must be .* got None"),
    "all excluded": (lambda pg: pg.shrink([0, 1]), "exclude names the calling rank"),
    "myself": (lambda pg: pg.shrink([pg.rank()]), "exclude names the calling rank"),
    "exclude range": (lambda pg: pg.shrink([2]), r"exclude\[0\] must be .* got 2"),
}


def test_bad_splits(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        for call, message in BAD_SPLITS.values():
            with pytest.raises(InvalidUsageError, match=message):
                call(pg)
            assert total(pg) == 1.0
        if pg.rank() == 0:  # calls that were wrong do not count, or the two would not meet
            for call, message in BAD_SPLITS.values():
                with pytest.raises(InvalidUsageError, match=message):
                    call(pg)
        part = pg.split([0, 1], timeout=10)
        assert total(part) == 1.0
        part.shutdown()

    run_ranks(2, body, tenant)


def test_copies_of_what_holds_a_group_hold_the_same_one(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        module = torch.nn.Linear(2, 2)
        module.pg = pg  # type: ignore[assignment]  # any attribute may be set
        assert copy.deepcopy(module).pg is pg
        assert copy.copy(pg) is pg

    run_ranks(1, body, tenant)


def test_shrink_leaves_ranks_out(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> tuple[int, ...] | None:
        pg.barrier()
        if pg.rank() == 1:
            return None
        left = pg.shrink([1])
        assert total(left) == 2.0
        left.shutdown()
        return left.global_ranks

    assert run_ranks(3, body, tenant) == [(0, 2), None, (0, 2)]


def test_groups_merge_over_a_store(tenant: Tenant) -> None:
    meeting = HashStore()

    def body(pg: ProcessGroup) -> tuple[int, ...]:
        with pytest.raises(InvalidUsageError, match=r"size must be .* got 1"):
            pg.merge_remote_group(meeting, 1)
        part = pg.split([2, 0]) if pg.rank() != 1 else pg.split([1])
        assert part is not None
        whole = part.merge_remote_group(
            meeting, 3, timeout=10, group_name=f"whole {tenant}", group_desc="all"
        )
        assert (whole.group_name, whole.group_desc, whole.timeout_s) == (f"whole {tenant}", "all", 10.0)
        assert total(whole) == 3.0
        assert total(part) == (1.0 if pg.rank() == 1 else 2.0)
        whole.barrier()
        whole.shutdown()
        return whole.global_ranks

    assert run_ranks(3, body, tenant) == [(1, 2, 0)] * 3


def test_a_merge_names_those_that_came(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        with pytest.raises(OperationTimeoutError, match=r"1 of 3 ranks arrived within 0.1 s: rank"):
            pg.merge_remote_group(HashStore(), 3, timeout=0.1)
        pg.barrier()

    run_ranks(2, body, tenant)


# The current group


def test_legacy_calls_in_a_block_act_on_the_group(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        part = pg.split([2, 1])
        if part is not None:
            with process_group(part):
                assert (legacy.get_rank(), legacy.get_world_size()) == (part.rank(), 2)
                mine = torch.tensor([float(pg.rank())])
                legacy.all_reduce(mine)
                assert mine.item() == 3.0
                mine = torch.tensor([float(pg.rank())])
                legacy.broadcast(mine, src=0)  # rank 0 of the block's group is rank 2 of the job
                assert mine.item() == 2.0
                with process_group(pg):
                    assert legacy.get_rank() == pg.rank()
                assert legacy.get_rank() == part.rank()
            part.shutdown()
        assert dist2.current_process_group() is None

    run_ranks(3, body, tenant)


# Threads, order, many at once


def test_threads_use_their_groups_at_once(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        groups = [pg.split([0, 1], name=f"{tenant} thread {n}") for n in range(3)]

        def use(group: ProcessGroup) -> None:
            with process_group(group):
                assert dist2.current_process_group() is group
                for numel in (1, 5_000, 3) * 5:
                    mine = torch.ones(numel)
                    group.all_reduce(mine)
                    assert torch.equal(mine, torch.full((numel,), 2.0))

        together(*(partial(use, group) for group in groups))
        for group in groups:
            group.shutdown()

    run_ranks(2, body, tenant)


def test_threads_of_a_rank_share_one_group(tenant: Tenant) -> None:
    """Equal calls from several threads of a rank pair up, in any order of arrival."""

    def body(pg: ProcessGroup) -> None:
        def use() -> None:
            for _ in range(10):
                mine = torch.ones(7)
                pg.all_reduce(mine)
                assert torch.equal(mine, torch.full((7,), 2.0))
                mine = torch.ones(7)
                with pg.coalescing() as batch:  # each thread has its own
                    pg.all_reduce(mine)
                batch.wait()
                assert torch.equal(mine, torch.full((7,), 2.0))

        together(use, use, use)
        assert pg._get_sequence_number_for_group() == 60

    run_ranks(2, body, tenant)


def test_a_hundred_operations_at_once(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        tensors = [torch.full((n + 1,), float(pg.rank())) for n in range(100)]
        works = [pg.all_reduce(tensor, async_op=True) for tensor in tensors]
        gc.collect()  # works that only the group holds must live
        del works[1::2]
        pg.barrier()  # comes after all of them
        assert all(work.is_completed() for work in works)
        assert all(torch.equal(each, torch.full_like(each, 1.0)) for each in tensors)

    run_ranks(2, body, tenant)


def test_a_callback_may_wait_for_what_it_calls(tenant: Tenant) -> None:
    """A thread that has the group's turn calls the callback, and then releases the turn."""

    def body(pg: ProcessGroup) -> None:
        def ones() -> torch.Tensor:
            return torch.ones(3)

        def future(_: object = None) -> torch.Tensor:
            return pg.all_reduce(ones(), async_op=True).get_future().wait()[0]

        def work(_: object) -> torch.Tensor:
            pg.all_reduce(again := ones(), async_op=True).wait()
            return again

        def call(_: object) -> torch.Tensor:
            pg.all_reduce(again := ones())
            return again

        for callback in (future, work, call):
            works = [pg.all_reduce(ones(), async_op=True) for _ in range(3)]
            asked = [each.get_future() for each in works]
            chained = asked[-1].then(callback).then(callback)
            for each in works:
                each.wait()
            assert torch.equal(chained.wait(), ones() * 2)
        pg.all_reduce(last := ones())
        assert torch.equal(last, ones() * 2)

    run_ranks(2, body, tenant)


def test_a_callback_may_wait_while_others_queue(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        called = threading.Event()

        def call(_: object) -> None:
            pg.all_reduce(torch.ones(1))
            called.set()

        works = [pg.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        works[0].get_future().then(call)
        assert called.wait(10)
        for work in works:
            work.wait()
        total(pg)

    run_ranks(1, body, tenant)


def test_messages_in_flight_while_collectives_run(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        other = 1 - pg.rank()
        got = [torch.empty(n * 40_000 + 1) for n in range(6)]
        receives = [pg.irecv(each, other, tag) for tag, each in enumerate(got)]
        sends = []
        for tag in range(6):
            sends.append(pg.isend(torch.full((tag * 40_000 + 1,), float(tag)), other, tag))
            mine = torch.ones(50_000)
            pg.all_reduce(mine)
            assert torch.equal(mine, torch.full((50_000,), 2.0))
        for work in (*receives, *sends):
            work.wait()
        for tag, each in enumerate(got):
            assert torch.equal(each, torch.full_like(each, float(tag)))

    run_ranks(2, body, tenant)


def test_numbers_and_completion_hooks(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> list[tuple[object, int]]:
        told: list[Any] = []
        seen: list[tuple[str, int]] = []
        pg._register_on_completion_hook(told.append)
        remove = pg.register_completion_hook(
            lambda operation: seen.append((operation.signature.kind.value, operation.seq))
        )
        assert pg._has_hooks()
        pg.all_reduce(torch.ones(2))
        pg.barrier(async_op=True).wait()
        pg.barrier()
        remove()
        pg.broadcast(torch.ones(3))
        assert seen == [("all_reduce", 1), ("barrier", 2), ("barrier", 3)]
        assert pg._get_sequence_number_for_group() == 4
        first = told[0]
        assert first.time_finished >= first.time_started > timedelta(0)
        assert first.active_duration == first.time_finished - first.time_started
        return [(info.op_type, info.seq) for info in told]

    expected = [(OpType.ALLREDUCE, 1), (OpType.BARRIER, 2), (OpType.BARRIER, 3), (OpType.BROADCAST, 4)]
    assert run_ranks(2, body, tenant) == [expected] * 2


def test_monitored_barrier_names_the_absent(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> tuple[int, ...]:
        pg.monitored_barrier()
        with pytest.raises(InvalidUsageError, match="timeout"):
            pg.monitored_barrier(timeout=-1)  # nothing was counted
        pg.monitored_barrier(timeout=5)
        missing: tuple[int, ...] = ()
        if pg.rank() < 2:
            with pytest.raises(OperationTimeoutError) as failure:
                pg.monitored_barrier(timeout=0.3, wait_all_ranks=True)
            missing = failure.value.missing
        pg.barrier()
        return missing

    assert run_ranks(4, body, tenant) == [(2, 3), (2, 3), (), ()]


def test_coalescing(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        tensors = [example((n + 1,), torch.float32, pg.rank(), salt=n) for n in range(4)]
        with pg.coalescing() as batch:
            works = [pg.all_reduce(tensor, ReduceOp.MAX) for tensor in tensors]
            assert not any(work.is_completed() for work in works)
            with pytest.raises(InvalidUsageError, match="already inside a coalescing block"):
                pg._start_coalescing(torch.device("cpu"))
        batch.wait()
        for n, tensor in enumerate(tensors):
            everyone = [example((n + 1,), torch.float32, rank, salt=n) for rank in range(2)]
            assert torch.equal(tensor, reduced(everyone, Reduction.of(ReduceOp.MAX)))

    run_ranks(2, body, tenant)


def test_waiting_inside_a_coalescing_block_is_refused(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        total, others = torch.ones(2), torch.ones(3)
        with pg.coalescing() as batch:
            first = pg.all_reduce(total)
            calls: list[Any] = [pg.send(others, 1 - pg.rank()), pg.recv(got := torch.zeros(3), 1 - pg.rank())]
            for each in (first, *calls, batch):
                with pytest.raises(InvalidUsageError, match="wait for it after the block"):
                    each.wait()
            assert not first.is_completed()
        batch.wait()
        assert total.tolist() == [2.0, 2.0]
        assert got.tolist() == [1.0, 1.0, 1.0]

    run_ranks(2, body, tenant)


COMPOSITE: dict[str, Callable[[ProcessGroup], object]] = {
    "split_by": lambda pg: pg.split_by(0),
    "all_gather_object": lambda pg: pg.all_gather_object("it"),
    "gather_object": lambda pg: pg.gather_object("it"),
    "broadcast_object": lambda pg: pg.broadcast_object("it"),
    "scatter_object": lambda pg: pg.scatter_object(["one", "another"]),
    "recv_object": lambda pg: pg.recv_object(1 - pg.rank()),
    "functional": lambda pg: functional.all_reduce(torch.ones(2), pg),
}


@pytest.mark.parametrize("name", COMPOSITE)
def test_calls_that_read_what_a_coalescing_block_puts_off_are_refused_in_it(
    tenant: Tenant, name: str
) -> None:
    def body(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError, match="inside a coalescing block"), pg.coalescing():
            COMPOSITE[name](pg)
        pg.all_reduce(total := torch.ones(2))
        assert total.tolist() == [2.0, 2.0]

    run_ranks(2, body, tenant)


def both(pg: ProcessGroup) -> list[torch.Tensor]:
    """Return a tensor for each rank."""
    return [torch.full((2,), 10.0 * pg.rank() + rank) for rank in range(2)]


def blank() -> list[torch.Tensor]:
    return [torch.zeros(2), torch.zeros(2)]


LISTS: dict[str, Callable[..., tuple[list[torch.Tensor], list[torch.Tensor], Any]]] = {
    "all_gather": lambda pg, **given: (out := blank(), [], pg.all_gather(out, both(pg)[0], **given)),
    "all_gather_v": lambda pg, **given: (out := blank(), [], pg.all_gather_v(out, both(pg)[0], **given)),
    "reduce_scatter": lambda pg, **given: (
        out := blank()[:1],
        parts := both(pg),
        pg.reduce_scatter(out[0], parts, **given),
    ),
    "all_to_all": lambda pg, **given: (
        out := blank(),
        parts := both(pg),
        pg.all_to_all(out, parts, **given),
    ),
    "gather": lambda pg, **given: (
        out := blank(),
        [],
        pg.gather(out if pg.rank() == 0 else None, both(pg)[0], **given),
    ),
    "scatter": lambda pg, **given: (
        out := blank()[:1],
        parts := both(pg),
        pg.scatter(out[0], parts if pg.rank() == 0 else None, **given),
    ),
    "all_reduce_coalesced": lambda pg, **given: (out := both(pg), [], pg.all_reduce_coalesced(out, **given)),
}
"""Calls with lists: return the outputs, the other list, and the Work."""


@pytest.mark.parametrize("how", ["async_op", "coalescing"])
@pytest.mark.parametrize("name", LISTS)
def test_the_lists_of_a_call_are_the_callers_again_once_it_returns(
    tenant: Tenant, name: str, how: str
) -> None:
    def body(pg: ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        expected, _, _ = LISTS[name](pg)
        if how == "async_op":
            outputs, others, work = LISTS[name](pg, async_op=True)
            held, kept = [*outputs], [*others]
            outputs[:], others[:] = [torch.zeros(1)], []
        else:
            with pg.coalescing() as work:
                outputs, others, _ = LISTS[name](pg)
                held, kept = [*outputs], [*others]
                outputs.clear()
                others.clear()
        work.wait()
        del kept
        return held, expected

    for held, expected in run_ranks(2, body, tenant):
        assert [each.tolist() for each in held] == [each.tolist() for each in expected]


def test_a_coalescing_block_that_raises_starts_nothing(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        mine = torch.ones(2)
        with pytest.raises(KeyError), pg.coalescing():
            work = pg.all_reduce(mine)
            raise KeyError("mine")
        with pytest.raises(InvalidUsageError, match="never started"):
            work.wait(5)
        assert torch.equal(mine, torch.ones(2))
        pg.all_reduce(mine)
        assert torch.equal(mine, torch.full((2,), 2.0))

    run_ranks(2, body, tenant)


# The end


def test_shutdown_finishes_what_was_issued(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        other = 1 - pg.rank()
        tensors = [torch.ones(10_000) for _ in range(20)]
        works = [pg.all_reduce(tensor, async_op=True) for tensor in tensors]
        got = torch.empty(300_000)
        works += [pg.irecv(got, other), pg.isend(torch.full((300_000,), float(pg.rank())), other)]
        pg.shutdown()
        assert all(work.is_success() for work in works)
        assert all(torch.equal(tensor, torch.full((10_000,), 2.0)) for tensor in tensors)
        assert torch.equal(got, torch.full((300_000,), float(other)))

    run_ranks(2, body, tenant)


@pytest.mark.parametrize("how", ["shutdown", "abort"])
def test_ending_twice_is_fine_and_nothing_works_afterwards(tenant: Tenant, how: str) -> None:
    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        getattr(pg, how)()
        assert "closed" in repr(pg)
        assert isinstance(pg.get_error(), GroupAbortedError)
        calls: list[Callable[[], object]] = [
            lambda: pg.all_reduce(torch.ones(1)),
            lambda: pg.all_reduce(torch.ones(1), async_op=True),
            lambda: pg.barrier(),
            lambda: pg.isend(torch.ones(1), 0),
            lambda: pg.split([0, 1]),
            lambda: pg.split_by(0),
            lambda: pg.shrink([1 - pg.rank()]),
            lambda: pg.monitored_barrier(),
            lambda: pg.merge_remote_group(HashStore(), 2),
        ]
        for call in calls:
            with pytest.raises(GroupAbortedError, match="shut down" if how == "shutdown" else "aborted"):
                call()
        for again in (pg.shutdown, pg.abort, pg.shutdown):
            again()

    run_ranks(2, body, tenant)


def test_a_name_is_free_again_after_the_end(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:  # ranks are threads of one process here, and names are the process's
            for _ in range(2):
                part = pg.split([0], name="taken")
                with pytest.raises(InvalidUsageError, match="name 'taken' is taken by another group"):
                    pg.split([0], name="taken")
                part._set_group_name("renamed")
                assert part.group_name == "renamed"
                with pytest.raises(InvalidUsageError, match="name 'renamed' is taken by another group"):
                    pg.split([0], name="renamed")
                with pg.split([0], name="taken") as other:
                    assert total(other) == 0.0
                assert total(part) == 0.0
                part.shutdown()
        pg.barrier()

    run_ranks(2, body, tenant)
