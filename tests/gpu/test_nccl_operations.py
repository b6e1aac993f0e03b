"""All operations on a GPU against torch's results: alone, and with 2 and 3 processes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_ranks import run_on_gpu
from support.oracle import example, reduced

from dist2 import InvalidUsageError, ProcessGroup, ReduceOp, premul_sum
from dist2.operation.kinds import Reduction

SHAPES = ((), (1,), (0,), (7,), (3, 5), (1031,), (300_007,))
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, premul_sum(0.5))


def on_gpu(
    shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float32, salt: int = 0
) -> torch.Tensor:
    return example(shape, dtype, rank, salt).cuda()


ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""NCCL adds halves in their own precision, in an order of its own: the error of a sum near 0 is that of its
parts."""


def close(actual: torch.Tensor, expected: torch.Tensor, off: int = 0) -> None:
    """Check values up to rounding; integers, which may be ``off``, exactly."""
    if expected.is_floating_point() or expected.is_complex():
        atol = ROUNDING.get(expected.dtype, 1e-5)
        torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=atol, rtol=max(atol / 10, 1e-5))
    elif off:
        assert (actual.cpu().int() - expected.cpu().int()).abs().max().item() <= off
    else:
        assert torch.equal(actual.cpu(), expected.cpu())


def reductions(pg: ProcessGroup) -> None:
    size, me = pg.size(), pg.rank()
    for dtype in DTYPES:
        for op in OPS:
            everyone = [example((1031,), dtype, rank) for rank in range(size)]
            mine = everyone[me].cuda()
            try:
                pg.all_reduce(mine, op)
            except InvalidUsageError:
                continue
            # NCCL does not say how it rounds averages of integers.
            rounds = op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex)
            close(mine, reduced(everyone, Reduction.of(op)), int(rounds))
    for shape in SHAPES:
        everyone = [example(shape, torch.float32, rank) for rank in range(size)]
        total = reduced(everyone, Reduction.of(ReduceOp.SUM))
        for root in range(size):
            mine = everyone[me].cuda()
            pg.reduce(mine, root)
            close(mine, total if root == me else everyone[me])
        spread = torch.zeros(*shape, 2, device="cuda")
        spread[..., 0] = everyone[me].cuda()
        pg.all_reduce(spread[..., 0])
        close(spread[..., 0], total)
        parts = [torch.stack([everyone[rank] + part for part in range(size)]) for rank in range(size)]
        output = torch.empty(shape, device="cuda")
        pg.reduce_scatter_single(output, parts[me].cuda())
        close(output, reduced([part[me] for part in parts], Reduction.of(ReduceOp.SUM)))
        pg.reduce_scatter(output, list(parts[me].cuda()))
        close(output, reduced([part[me] for part in parts], Reduction.of(ReduceOp.SUM)))
    tensors = [torch.full((n + 1,), float(me), device="cuda") for n in range(5)]
    pg.all_reduce_coalesced(tensors)
    assert all(each[0].item() == sum(range(size)) for each in tensors)


def moves(pg: ProcessGroup) -> None:
    size, me = pg.size(), pg.rank()
    for dtype in (*DTYPES, torch.float8_e4m3fn):
        everyone = [example((5, 3), torch.float32, rank).abs().to(dtype) for rank in range(size)]
        outputs = [torch.empty((5, 3), dtype=dtype, device="cuda") for _ in range(size)]
        pg.all_gather(outputs, everyone[me].cuda())
        for output, expected in zip(outputs, everyone, strict=True):
            assert torch.equal(output.cpu().view(torch.uint8), expected.view(torch.uint8))
    for shape in SHAPES:
        everyone = [example(shape, torch.float32, rank) for rank in range(size)]
        whole = torch.empty((size, *shape), device="cuda")
        pg.all_gather_single(whole, everyone[me].cuda())
        close(whole, torch.stack(everyone))
        for root in range(size):
            mine = everyone[me].cuda()
            pg.broadcast(mine, root)
            close(mine, everyone[root])
            outputs = [torch.empty(shape, device="cuda") for _ in range(size)] if root == me else []
            pg.gather(outputs, everyone[me].cuda(), root)
            for output, expected in zip(outputs, everyone, strict=False):
                close(output, expected)
            target = torch.empty(shape, device="cuda")
            pg.scatter(target, [each.cuda() for each in everyone] if root == me else None, root)
            close(target, everyone[me])
    uneven = [torch.full((rank + 1, 3), float(rank), device="cuda") for rank in range(size)]
    outputs = [torch.empty_like(each) for each in uneven]
    pg.all_gather_v(outputs, uneven[me])
    assert all(map(torch.equal, outputs, uneven))
    sent = [torch.full((me + peer + 1,), 10.0 * me + peer, device="cuda") for peer in range(size)]
    received = [torch.empty(me + peer + 1, device="cuda") for peer in range(size)]
    pg.all_to_all(received, sent)
    assert [each[0].item() for each in received] == [10.0 * peer + me for peer in range(size)]
    rows, back = torch.arange(float(size), device="cuda") + 10 * me, torch.empty(size, device="cuda")
    pg.all_to_all_single(back, rows)
    assert back.tolist() == [10.0 * peer + me for peer in range(size)]
    pg.barrier()


def messages(pg: ProcessGroup) -> None:
    size, me = pg.size(), pg.rank()
    right, left = (me + 1) % size, (me - 1) % size
    for tag in (0, 3):  # through NCCL, and by way of the host
        for numel in (1, 1_000_000):
            mine, got = torch.full((numel,), float(me), device="cuda"), torch.empty(numel, device="cuda")
            sending = pg.isend(mine, right, tag)
            pg.recv(got, left, tag)
            sending.wait()
            assert got[-1].item() == left
    if me == 0:
        for _ in range(size - 1):
            got = torch.empty(2, device="cuda")
            assert pg.recv(got, None, 7).source_rank() == got[0].item()
    else:
        pg.send(torch.full((2,), float(me), device="cuda"), 0, 7)


def objects_and_cpu(pg: ProcessGroup) -> None:
    assert pg.all_gather_object({"rank": pg.rank()}) == [{"rank": rank} for rank in range(pg.size())]
    on_cpu, device = torch.ones(5), torch.ones(5, device="cuda")
    pg.all_reduce(on_cpu)
    pg.all_reduce(device)
    assert on_cpu.tolist() == device.tolist() == [float(pg.size())] * 5
    if pg.size() > 1:
        return
    with pytest.raises(InvalidUsageError, match="all be on the group's device or all on the CPU"):
        pg.all_gather([torch.empty(2)], torch.ones(2, device="cuda"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("body", [reductions, moves, messages, objects_and_cpu])
def test_operations(body: Any, world_size: int, tmp_path: Path) -> None:
    run_on_gpu(world_size, body, tmp_path)
