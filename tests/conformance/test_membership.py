"""Revoke, agree, shrink and coming together again, with ranks as threads, on every backend and transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.captured_logs import logged
from support.ranks import TENANTS, Tenant, plugin_tenants, run_ranks
from support.time_limits import in_time

from dist2 import (
    Agreement,
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    HashStore,
    InvalidUsageError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    PrefixStore,
    ProcessGroup,
)

PLUGINS = [tenant for tenant in plugin_tenants() if tenant.name in ("compiled", "duck")]
pytestmark = pytest.mark.parametrize("tenant", [*TENANTS, *PLUGINS], ids=str)


def total(pg: ProcessGroup) -> float:
    mine = torch.tensor([float(pg.global_rank())])
    pg.all_reduce(mine)
    return mine.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_all_get_the_and_of_all_flags(tenant: Tenant, world_size: int) -> None:
    def body(pg: ProcessGroup) -> list[Agreement]:
        everything = [pg.agree(), pg.agree(~(1 << pg.rank())), pg.agree(-(2**63)), pg.agree(2**63 - 1)]
        everything += [pg.agree(turn << 1 | (pg.rank() == turn % world_size)) for turn in range(4)]
        assert total(pg) == sum(range(world_size))
        return everything

    alone = int(world_size == 1)
    flags = [-1, ~((1 << world_size) - 1), -(2**63), 2**63 - 1, *(turn << 1 | alone for turn in range(4))]
    expected = [Agreement(each, ()) for each in flags]
    assert run_ranks(world_size, body, tenant) == [expected] * world_size


BAD_FLAGS = (2**63, -(2**63) - 1, 1.0, "1", True, None)


def test_flags_that_do_not_fit_are_refused(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        for flags in BAD_FLAGS:
            with pytest.raises(InvalidUsageError, match="flags must be an int that fits 64 bits"):
                pg.agree(flags)
        assert pg.agree(3).flags == 3

    run_ranks(2, body, tenant)


def test_ranks_that_closed_the_group_are_left_out(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> Any:
        group = pg.split([0, 1, 2, 3])
        assert group is not None
        group.barrier()
        if pg.rank() == 1:
            group.shutdown()
            pg.barrier()  # it waits in another group: no thread reads its links
            return None
        agreed = group.agree(0b111 - pg.rank())
        left = group.shrink()
        with pytest.raises(GroupAbortedError):
            _abort_meanwhile(left)
        sizes = total(group.shrink(exclude=[1])), left.global_ranks
        group.abort()
        pg.barrier()
        return agreed, sizes

    results = run_ranks(4, body, tenant)
    assert results[0] == results[2] == results[3] == (Agreement(0b100, (1,)), (5.0, (0, 2, 3)))


def _abort_meanwhile(group: ProcessGroup) -> None:
    """Abort a group from another thread while this one agrees: only one rank does it, others follow."""
    threading.Timer(0.05, group.abort).start()
    start = time.monotonic()
    try:
        while True:
            group.agree(timeout=5)
            group.recv(torch.ones(1), group.rank(), timeout=5)
    finally:
        assert time.monotonic() - start < 2


def test_an_absent_rank_is_named_and_may_come_later(tenant: Tenant) -> None:
    late = threading.Barrier(3, timeout=10)

    def body(pg: ProcessGroup) -> Agreement:
        if pg.rank() == 2:
            late.wait()
            return pg.agree(0b110)
        with pytest.raises(OperationTimeoutError, match=r"agree in group .* rank 2 did not") as caught:
            pg.agree(0b011, timeout=0.3)
        assert (caught.value.missing, caught.value.timeout_s, caught.value.op) == ((2,), 0.3, "agree")
        late.wait()
        return pg.agree(0b011)

    assert run_ranks(3, body, tenant) == [Agreement(0b010, ())] * 3


def test_agree_here_and_shrink_there_is_told_to_all(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> tuple[str, Any, Any, float]:
        with pytest.raises(MismatchError) as caught:
            pg.shrink() if pg.rank() == 1 else pg.agree()
        error = caught.value
        with pg.shrink() as left:  # now all do
            return str(error), error.op, error.actual, total(left)

    calls = {0: "agree()", 1: "shrink()", 2: "agree()"}
    for rank, (text, op, actual, sum_) in enumerate(run_ranks(3, body, tenant)):
        assert (op, actual, sum_) == ("shrink" if rank == 1 else "agree", calls, 3.0)
        assert "operation differs: ranks 0, 2 agree(), rank 1 shrink()" in text


def test_revoking_one_group_leaves_the_others(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> float:
        group = pg.split([2, 0, 1])
        assert group is not None
        inner = group.split([0, 1])
        work = None
        events = PrefixStore("events", pg.spec.store)
        if pg.rank() == 1:
            events.wait(["issued by 0", "issued by 2"])
            group.revoke()
            group.revoke()
        else:
            work = group.all_reduce(torch.ones(5), async_op=True)
            events.set(f"issued by {pg.rank()}", b"")
        if work is not None:
            with pytest.raises(GroupRevokedError, match=r"was revoked by rank 1 \(rank 2 of ") as caught:
                work.wait()
            assert caught.value.by == 2
        with pytest.raises(GroupRevokedError):
            group.barrier()
        assert isinstance(group.get_error(), GroupRevokedError)
        assert group.agree(pg.rank() + 1).failed == ()
        smaller = group.shrink(name=f"{tenant} after {group.group_name}")
        sums = total(smaller) + total(pg) + (total(inner) if inner is not None else 2.0)
        smaller.shutdown()
        group.shutdown()
        return sums

    assert run_ranks(3, body, tenant) == [8.0] * 3


def test_a_split_with_a_rank_that_has_left_names_it(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 0:
            pg.shutdown()
            pg.get_group_store().get("rank 1 knows")  # its links stay until then
            return
        try:
            while not pg.backend.departed():
                pg.backend.look()
            error, took_s = timed(lambda: pg.split([1, 0]).barrier())
            in_time(took_s, 1.0)
            assert error.ranks == (1,)
            assert "rank 0 (rank 1 of" in str(error)
            assert "left the group" in str(error)
        finally:
            pg.get_group_store().set("rank 1 knows", "yes")

    run_ranks(2, body, tenant)


def timed(call: Callable[[], object]) -> tuple[PeerLostError, float]:
    began_s = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        call()
    return caught.value, time.monotonic() - began_s


@pytest.mark.parametrize("end", ["revoke", "abort"])
def test_each_call_that_a_broken_group_ends_is_named_in_its_error(tenant: Tenant, end: str) -> None:
    """A message and a collective under way at once."""

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 1:
            assert pg.get_group_store().get("rank 0 has called")
            getattr(pg, end)()
            return
        works = [pg.irecv(torch.ones(2), 1), pg.all_reduce(torch.ones(3), async_op=True)]
        while not works[1].operation.started_ns:  # it is queued
            time.sleep(0.001)
        pg.get_group_store().set("rank 0 has called", "yes")
        errors = [failure(work.wait) for work in works]
        for error, call, seq in zip(
            errors, ("recv(float32[2]", "all_reduce(float32[3]"), (1, 2), strict=True
        ):
            assert str(error).startswith(call), error
            assert str(error).count(" in group ") == 1, error
            assert (error.op, error.seq) == (call.partition("(")[0], seq)

    run_ranks(2, body, tenant)


def failure(call: Callable[[], object]) -> Dist2Error:
    with pytest.raises((GroupRevokedError, PeerLostError)) as caught:
        call()
    return caught.value


def test_closing_names_the_calls_that_hold_it_up(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist2.operation.runner._PATIENCE_S", 0.01)

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 0:
            pg.irecv(torch.ones(3), 1)
            pg.set_timeout(0.2)
            pg.shutdown()
        else:
            pg.get_group_store().get("rank 0 has closed")
        pg.get_group_store().set("rank 0 has closed", "yes")

    with logged() as logs:
        run_ranks(2, body, tenant)
    (told,) = [entry["event"] for entry in logs if "still runs calls" in entry["event"]]
    assert "nobody has waited for: recv(float32[3], peer=1" in told


def test_a_closed_group_neither_agrees_nor_revokes(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        group = pg.split([0, 1])
        assert group is not None
        group.barrier()
        group.shutdown()
        for call in (group.revoke, group.agree, group.shrink, group.handle):
            with pytest.raises(GroupAbortedError):
                call()

    run_ranks(2, body, tenant)


def _mismatch(group: ProcessGroup) -> None:
    with pytest.raises(MismatchError):
        group.all_reduce(torch.ones(3 + group.rank()), timeout=5)
        group.barrier()


def _timeout(group: ProcessGroup) -> None:
    if group.rank() == 0:
        with pytest.raises(OperationTimeoutError):
            group.all_reduce(torch.ones(3), timeout=0.1)
        group.revoke()
    else:
        with pytest.raises(GroupRevokedError):
            group.recv(torch.ones(1), 0)


def _abort(group: ProcessGroup) -> None:
    group.abort()


@pytest.mark.parametrize("spoil", [_mismatch, _timeout, _abort])
def test_a_child_that_breaks_leaves_parent_and_siblings(
    tenant: Tenant, spoil: Callable[[ProcessGroup], None]
) -> None:
    def body(pg: ProcessGroup) -> list[float]:
        groups = [pg.split(ranks) for ranks in ([0, 1], [1, 2], [2, 0], [0, 1, 2])]
        child, *others = groups
        if child is not None:
            spoil(child)
        sums = [total(pg)] + [total(group) for group in others if group is not None]
        if child is not None and spoil is not _abort:
            sums.append(total(child.shrink()))
        return sums

    results = run_ranks(3, body, tenant)
    extra = [] if spoil is _abort else [1.0]
    assert results == [[3.0, 2.0, 3.0, *extra], [3.0, 3.0, 3.0, *extra], [3.0, 3.0, 2.0, 3.0]]


def test_survivors_that_made_different_groups_before_shrink_alike(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> float:
        if pg.rank() == 0:
            assert pg.split([1, 2]) is None
            pg.split([0])
        one, two = pg.shrink(), pg.shrink(name=f"{tenant} second {pg.group_name}")
        assert one.info.uid != two.info.uid
        return total(two) + total(one)

    assert run_ranks(3, body, tenant) == [6.0] * 3


# Coming together


def test_groups_are_reconfigured_by_handles(tenant: Tenant) -> None:
    board = HashStore()

    def body(pg: ProcessGroup) -> tuple[int, float]:
        part = pg.split([0, 2]) if pg.rank() != 1 else pg.split([1])
        assert part is not None
        board.set(str(pg.rank()), part.handle())
        handles = [board.get(str(rank)).decode() for rank in (2, 0, 1)]
        with pytest.raises(InvalidUsageError, match="handles must name this process, and each once"):
            part.reconfigure("u", [*handles, handles[0]])
        with pytest.raises(InvalidUsageError, match=r"handles\[1\] is not the handle of a group: 'x'"):
            part.reconfigure("u", [part.handle(), "x"])
        whole = part.reconfigure(f"{tenant} whole", handles, 10)
        result = whole.rank(), total(whole)
        whole.barrier()
        whole.shutdown()
        assert total(part) == (1.0 if pg.rank() == 1 else 2.0)
        return result

    assert run_ranks(3, body, tenant) == [(1, 3.0), (2, 3.0), (0, 3.0)]


def test_a_reconfiguration_names_who_did_not_come(tenant: Tenant) -> None:
    board = HashStore()

    def body(pg: ProcessGroup) -> None:
        board.set(str(pg.rank()), pg.handle())
        handles = [board.get(str(rank)).decode() for rank in range(2)]
        if pg.rank() == 0:
            with pytest.raises(OperationTimeoutError, match=r"reconfigure 'v' .*rank 1 did not") as caught:
                pg.reconfigure("v", handles, 0.2)
            assert caught.value.missing == (1,)
        pg.barrier()

    run_ranks(2, body, tenant)


def test_keys_of_an_earlier_merge_are_named(tenant: Tenant) -> None:
    meeting = HashStore()

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            with pytest.raises(OperationTimeoutError, match=r"1 of 2 ranks arrived .* give it a PrefixStore"):
                pg.merge_remote_group(meeting, 2, timeout=0.1)
            with pytest.raises(
                InvalidUsageError, match=r"group .*: rank 0 registered twice: .* a PrefixStore"
            ):
                pg.merge_remote_group(meeting, 2, timeout=0.1)
        pg.barrier()

    run_ranks(2, body, tenant)


def test_parts_of_a_job_merge_to_its_order(tenant: Tenant) -> None:
    meeting = HashStore()

    def body(pg: ProcessGroup) -> tuple[int, int]:
        if pg.rank() == 0:
            half = pg.split([0])
            assert half is not None
            merged = half.merge_remote_group(meeting, 3, timeout=20)
        else:
            merged = pg.shrink(exclude=[0]).merge_remote_group(meeting, 3, timeout=20)
        total = torch.ones(1)
        merged.all_reduce(total)
        assert total.item() == 3
        return merged.rank(), merged.global_rank()

    # Parts of one job: by global rank. A rank that returns as a job of its own is last: see test_merging.
    assert run_ranks(3, body, tenant) == [(0, 0), (1, 1), (2, 2)]
