"""``verify=``: a bit that differs between ranks is named with rank, operation and place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import TENANTS, RankFailed, Tenant, run_ranks
from support.time_limits import in_time

import dist2
from dist2 import CorruptionError, InvalidUsageError, ProcessGroup, ReduceOp
from dist2.group import verification
from dist2.group.open_groups import open_groups
from dist2.group.verification import BLOCK_BYTES, hashes
from dist2.operation.kinds import OpKind

INPROC = TENANTS[0]
HOST_TENANTS = [each for each in TENANTS if each.backend != "nccl"]


def verified(tenant: Tenant, verify: bool | int = True) -> Tenant:
    return Tenant(tenant.name, tenant.backend, {**tenant.options, "verify": verify})


def flip(pg: ProcessGroup, kind: OpKind, at: int, output: int = 0, itemsize: int = 0) -> None:
    """Flip a bit of this rank's result of every operation of a kind, at a byte: a fault of its memory.

    Only of results with elements of some size, by default all but those of 8 bytes, as hashes are.
    """
    prepare = pg.backend.plan

    def planned(signature: Any) -> Any:
        execute, size = prepare(signature), signature.outputs[0].dtype.itemsize if signature.outputs else 0
        if signature.kind is not kind or (size != itemsize if itemsize else size == 8):
            return execute

        def broken(operation: Any, inputs: Any, outputs: Any) -> None:
            assert execute(operation, inputs, outputs) is None
            outputs[output].view(-1).view(torch.uint8)[at] ^= 8

        return broken

    for name in ("plan", "plan_plain"):
        setattr(pg.backend, name, planned)


def test_a_flipped_bit_is_named_with_rank_operation_and_block() -> None:
    def body(pg: ProcessGroup) -> None:
        x = torch.ones(3 * BLOCK_BYTES // 4)
        if pg.rank() == 2:
            flip(pg, OpKind.ALL_REDUCE, BLOCK_BYTES + 5)
        pg.broadcast(x, root=1)
        with pytest.raises(CorruptionError) as caught:
            pg.all_reduce(x)
        error = caught.value
        assert (error.ranks, error.op, error.seq, error.tensor) == ((2,), "all_reduce", 3, "the output")
        assert (error.offset_bytes, error.nbytes, error.rank) == (BLOCK_BYTES, BLOCK_BYTES, pg.rank())
        text = str(error)
        assert text.startswith(f"all_reduce(float32[{x.numel()}], op=sum) #3 at {Path(__file__)}:")
        assert "the result of rank 2 differs from that of the other ranks in bytes 65536 to 131072" in text
        assert x.isnan().all()  # as the outputs of every failed operation
        with pytest.raises(CorruptionError, match="cannot be used any more: all_reduce"):
            pg.barrier()
        with pg.shrink() as again:
            assert again.size() == 4
            again.all_reduce(torch.ones(1))

    run_ranks(4, body, verified(INPROC))


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta"]
)
def test_hashes_are_made_and_written_in_any_mode_of_torch(mode: Any) -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch.ones(3)
        with mode():
            work = pg.all_reduce(tensor, async_op=True)
            deadline = time.monotonic() + 10
            while not work.is_completed():  # the queue's thread runs it, not this one in a wait
                assert time.monotonic() < deadline
                time.sleep(0.001)
            work.wait()
        assert tensor.tolist() == [2.0] * 3

    verification._factors.cache_clear()
    run_ranks(2, body, verified(INPROC))


def test_a_bit_that_changes_among_the_hashes_stops_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist2.group.verification._SOON_S", 0.1)

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            flip(pg, OpKind.ALL_GATHER_SINGLE, 0, itemsize=8)
            with pytest.raises(CorruptionError):
                pg.all_reduce(torch.ones(2))
        else:
            pg.all_reduce(torch.ones(2))
        with pytest.raises(dist2.GroupRevokedError):
            pg.barrier()

    run_ranks(3, body, verified(INPROC))


@pytest.mark.parametrize("tenant", HOST_TENANTS, ids=str)
def test_two_ranks_see_that_they_differ(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        x = torch.arange(5, dtype=torch.bfloat16)
        if pg.rank() == 0:
            flip(pg, OpKind.ALL_GATHER, 3, output=1)
        work = pg.all_reduce(x, async_op=True)
        work.wait()
        assert x.tolist() == [0, 2, 4, 6, 8]
        outputs = [torch.empty_like(x), torch.empty_like(x)]
        with pytest.raises(CorruptionError, match="no majority shows which is right") as caught:
            pg.all_gather(outputs, x, async_op=True).wait()
        assert (caught.value.ranks, caught.value.tensor) == ((), "outputs[1]")
        assert (caught.value.offset_bytes, caught.value.nbytes) == (0, 10)

    run_ranks(2, body, verified(tenant))


def test_the_operations_with_equal_results_are_verified() -> None:
    kinds = {
        OpKind.ALL_REDUCE: lambda pg, x: pg.allreduce([x]).wait(),
        OpKind.ALL_REDUCE_COALESCED: lambda pg, x: pg.all_reduce_coalesced([x.clone(), x]),
        OpKind.BROADCAST: lambda pg, x: pg.broadcast(x, root=1),
        OpKind.ALL_GATHER: lambda pg, x: pg.all_gather([torch.empty_like(x) for _ in range(3)], x),
        OpKind.ALL_GATHER_V: lambda pg, x: pg.all_gather_v([torch.empty_like(x) for _ in range(3)], x),
        OpKind.ALL_GATHER_SINGLE: lambda pg, x: pg.all_gather_single(x.new_empty(6), x),
        OpKind.ALL_GATHER_SINGLE_COALESCED: lambda pg, x: pg.all_gather_single_coalesced(
            [x.new_empty(6)], [x]
        ),
    }

    def body(pg: ProcessGroup) -> None:
        for kind, call in kinds.items():
            with pg.split(range(3)) as part:  # derived groups verify as well
                call(part, torch.ones(2))
            with pg.split(range(3)) as part:
                if pg.rank() == 0:
                    flip(part, kind, 1)
                with pytest.raises(CorruptionError) as caught:
                    call(part, torch.ones(2))
                assert (caught.value.ranks, caught.value.op) == ((0,), kind.value)

    run_ranks(3, body, verified(INPROC))


def test_a_sample_and_operations_whose_results_differ() -> None:
    def body(pg: ProcessGroup) -> None:
        seen: list[str] = []
        pg.register_completion_hook(lambda operation: seen.append(operation.signature.kind.value))
        x, hooked = torch.ones(2), []
        pg.register_pre_hook(lambda operation, inputs, outputs: hooked.append(operation))
        for _ in range(4):
            pg.all_reduce(x)
            pg.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2)
        pg.all_reduce(torch.ones(0))
        checked = ["all_reduce", "all_gather_single", "reduce_scatter"]
        assert seen == [*["all_reduce", "reduce_scatter", *checked] * 2, "all_reduce"]
        assert len(hooked) == 9
        seen.clear()
        with pg.coalescing() as batch:
            pg.broadcast(x)
            pg.broadcast(x)
        batch.wait()
        assert seen == ["broadcast", "all_gather_single", "broadcast"]

    run_ranks(2, body, verified(INPROC, 2))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_nan_is_nan_and_zero_is_zero(dtype: torch.dtype) -> None:
    real = {torch.complex64: torch.float32}.get(dtype, dtype)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    some = torch.tensor([0.0, torch.nan, torch.inf, 1.5], dtype=real)
    same = torch.tensor([-0.0, torch.nan, torch.inf, 1.5], dtype=real)
    same.view(integer)[1] ^= 1  # another payload
    assert torch.isnan(same[1])
    assert torch.equal(hashes(some.view(dtype)), hashes(same.view(dtype)))
    for at in range(4):
        other = some.clone()
        other[at] = -2.0
        assert not torch.equal(hashes(some.view(dtype)), hashes(other.view(dtype)))


def test_ranks_that_fold_in_torch_and_in_the_core_agree() -> None:
    def body(pg: ProcessGroup) -> list[int]:
        tensor = torch.full((3,), -0.0 if pg.rank() else 0.0)
        if pg.rank():  # at an odd address, which the core leaves to torch
            tensor = torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1, count=3).fill_(-0.0)
        pg.all_reduce(tensor, ReduceOp.MIN)
        product = torch.full((5,), 1.1 + 0.3j)
        pg.all_reduce(product, ReduceOp.PRODUCT)
        return tensor.clone().view(torch.int32).tolist()

    found = run_ranks(2, body, verified(INPROC))
    assert found[0] != found[1], "the sign of zero depends on who folds"


def test_every_single_bit_changes_the_hash() -> None:
    data = torch.zeros(8, dtype=torch.uint8)
    seen = {hashes(data).item()}
    for at in range(64):
        flipped = data.clone()
        flipped[at // 8] ^= 1 << at % 8
        seen.add(hashes(flipped).item())
    assert len(seen) == 65


def test_hashes_follow_the_elements_not_their_layout() -> None:
    x = torch.arange(2 * BLOCK_BYTES + 3, dtype=torch.int64).to(torch.uint8)
    assert hashes(x).shape == (3,)
    shifted = torch.cat([x[:1], x])[1:]
    assert torch.equal(hashes(shifted), hashes(x))
    wide = torch.arange(12.0).view(3, 4)
    assert torch.equal(hashes(wide.t().contiguous().t()), hashes(wide))
    assert torch.equal(hashes(torch.tensor(1 + 2j).conj()), hashes(torch.tensor(1 - 2j)))
    assert not torch.equal(hashes(x), hashes(x.flip(0)))


@pytest.mark.parametrize("verify", [-1, 0.5, "yes"])
def test_other_arguments_are_refused(verify: Any) -> None:
    with pytest.raises(InvalidUsageError, match="verify must be a bool, or an int n >= 1"):
        dist2.new_group("fake", rank=0, world_size=2, verify=verify)


def test_nccl_refuses_before_ranks_meet() -> None:
    began = time.monotonic()
    with pytest.raises(InvalidUsageError, match="verify=1 needs a backend that completes operations on the"):
        dist2.new_group("nccl", 50, store=dist2.HashStore(), rank=0, world_size=2, verify=True)
    with pytest.raises(InvalidUsageError, match="verify=7 needs"):  # without any launcher
        dist2.new_group("cpu:socket,cuda:nccl", verify=7)
    in_time(time.monotonic() - began, 5.0)


@pytest.mark.skipif(list(TENANTS) == HOST_TENANTS, reason="NCCL is not installed, nor can its stub be built")
def test_a_backend_of_devices_refuses_and_leaves_nothing_open() -> None:
    (nccl,) = [each for each in TENANTS if each.backend == "nccl"]
    before = set(open_groups())
    with pytest.raises(RankFailed, match="verify=1 needs a backend that completes operations on the host"):
        run_ranks(2, lambda pg: None, verified(nccl))
    assert set(open_groups()) == before


def test_ranks_agree_on_the_argument() -> None:
    def body(pg: ProcessGroup) -> None:
        store = dist2.PrefixStore("other", pg.get_group_store())
        with pytest.raises(InvalidUsageError, match="verify"):
            dist2.new_group(
                "socket", 20, store=store, rank=pg.rank(), world_size=2, transport="inproc", verify=pg.rank()
            )

    run_ranks(2, body, INPROC)
