"""Collectives of every backend: one body over every backend, transport and world size.

Each test runs many cases inside one group: making ranks costs more than using them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import ReduceOp

from dist2 import InvalidUsageError, ProcessGroup, premul_sum
from dist2.operation.kinds import AnyReduceOp, Reduction
from dist2.runtime.torch_versions import negated_view
from dist2.testing.oracle import example, reduced
from dist2.testing.ranks import BackendCase

__all__ = [
    "test_all_gather",
    "test_all_gather_v",
    "test_all_reduce",
    "test_all_reduce_twice_gives_the_same_bits",
    "test_all_to_all",
    "test_all_to_all_single_in_equal_parts",
    "test_async_operations_complete_in_order",
    "test_barrier",
    "test_broadcast",
    "test_coalesced",
    "test_conjugated_views",
    "test_dtypes_and_reductions",
    "test_every_dtype_moves",
    "test_gather_and_scatter",
    "test_memory_layouts",
    "test_negated_views",
    "test_outputs_over_inputs",
    "test_reduce_leaves_the_others_alone",
    "test_reduce_scatter",
    "test_reduce_scatter_v",
    "test_tensors_that_require_grad",
]

SHAPES = ((), (1,), (0,), (7,), (3, 5), (2, 0, 3), (1031,))
LARGE = (300_007,)  # several blocks of shared memory, above the eager limit, not divisible


def same(actual: torch.Tensor, expected: torch.Tensor, tenant: BackendCase) -> None:
    """Bitwise where the backend promises it, else within rounding."""
    if tenant.bitwise or not (expected.is_floating_point() or expected.is_complex()):
        assert torch.equal(actual, expected), f"{actual} != {expected}"
    else:
        torch.testing.assert_close(actual, expected)


def strided(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return a non-contiguous tensor of the values of ``like``."""
    spread = torch.zeros((*shape, 2), dtype=like.dtype)
    spread[..., 0] = like
    return spread[..., 0]


def test_all_reduce(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for shape in (*SHAPES, LARGE):
            everyone = [example(shape, torch.float32, rank) for rank in range(world_size)]
            expected = reduced(everyone, Reduction.of(ReduceOp.SUM))
            mine = everyone[pg.rank()].clone()
            assert pg.all_reduce(mine).is_completed()
            same(mine, expected, tenant)
            if mine.numel():
                apart = strided(shape, everyone[pg.rank()])
                pg.all_reduce(apart)
                same(apart, expected, tenant)

    tenant.run(world_size, body)


def test_all_reduce_twice_gives_the_same_bits(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> list[torch.Tensor]:
        results = []
        for numel in (5, 70_001, 300_007):
            for _ in range(2):
                mine = example((numel,), torch.float32, pg.rank())
                pg.all_reduce(mine)
                results.append(mine)
        return results

    by_rank = tenant.run(world_size, body)
    for first, *others in zip(*by_rank, strict=True):
        assert all(torch.equal(first, other) for other in others)
    for once, again in zip(by_rank[0][::2], by_rank[0][1::2], strict=True):
        assert torch.equal(once, again)


def test_async_operations_complete_in_order(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        tensors = [example((100 + n,), torch.float64, pg.rank(), salt=n) for n in range(20)]
        works = [pg.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert [work.operation.seq for work in works] == list(range(1, 21))
        for n, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            assert work.wait()
            everyone = [example((100 + n,), torch.float64, rank, salt=n) for rank in range(world_size)]
            same(tensor, reduced(everyone, Reduction.of(ReduceOp.SUM)), tenant)
        assert all(work.is_completed() and work.is_success() for work in works)
        assert works[0].get_future().wait()[0] is tensors[0]

    tenant.run(world_size, body)


def test_broadcast(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for shape in (*SHAPES, LARGE):
            for root in range(world_size):
                mine = example(shape, torch.float32, pg.rank(), salt=root)
                pg.broadcast(mine, root)
                assert torch.equal(mine, example(shape, torch.float32, root, salt=root))

    tenant.run(world_size, body)


def test_reduce_leaves_the_others_alone(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for shape in (*SHAPES, LARGE):
            everyone = [example(shape, torch.float32, rank) for rank in range(world_size)]
            for root in range(world_size):
                for mine in (everyone[pg.rank()].clone(), strided(shape, everyone[pg.rank()])):
                    pg.reduce(mine, root)
                    if pg.rank() == root:
                        same(mine, reduced(everyone, Reduction.of(ReduceOp.SUM)), tenant)
                    else:
                        assert torch.equal(mine, everyone[pg.rank()])

    tenant.run(world_size, body)


def test_all_gather(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for shape in (*SHAPES, LARGE):
            everyone = [example(shape, torch.float32, rank) for rank in range(world_size)]
            outputs = [torch.empty(shape) for _ in range(world_size)]
            pg.all_gather(outputs, everyone[pg.rank()])
            assert all(map(torch.equal, outputs, everyone))
            whole = torch.empty((world_size, *shape))
            pg.all_gather_single(whole, everyone[pg.rank()])
            assert torch.equal(whole, torch.stack(everyone))

    tenant.run(world_size, body)


def test_all_gather_v(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for scale in (1, 40_000):
            everyone = [example((rank * scale, 3), torch.float32, rank) for rank in range(world_size)]
            outputs = [torch.empty_like(tensor) for tensor in everyone]
            pg.all_gather_v(outputs, everyone[pg.rank()])
            assert all(map(torch.equal, outputs, everyone))

    tenant.run(world_size, body)


def test_reduce_scatter(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for shape in (*SHAPES, (100_003,)):
            everyone = [
                [example(shape, torch.float32, rank, salt=part) for part in range(world_size)]
                for rank in range(world_size)
            ]
            column = [parts[pg.rank()] for parts in everyone]
            expected = reduced(column, Reduction.of(ReduceOp.SUM))
            output = torch.empty(shape)
            pg.reduce_scatter(output, everyone[pg.rank()])
            same(output, expected, tenant)
            output.zero_()
            pg.reduce_scatter_single(output, torch.stack(everyone[pg.rank()]))
            same(output, expected, tenant)

    tenant.run(world_size, body)


def test_reduce_scatter_v(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for scale in (1, 40_000):
            everyone = [
                [example((part * scale,), torch.float32, rank, salt=part) for part in range(world_size)]
                for rank in range(world_size)
            ]
            column = [parts[pg.rank()] for parts in everyone]
            output = torch.empty(pg.rank() * scale)
            pg.reduce_scatter_v(output, everyone[pg.rank()], ReduceOp.SUM)
            same(output, reduced(column, Reduction.of(ReduceOp.SUM)), tenant)

    tenant.run(world_size, body)


def test_gather_and_scatter(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for shape in (*SHAPES, LARGE):
            everyone = [example(shape, torch.float32, rank) for rank in range(world_size)]
            for root in range(world_size):
                at_root = pg.rank() == root
                outputs = [torch.empty(shape) for _ in range(world_size)] if at_root else None
                pg.gather(outputs, everyone[pg.rank()], root)
                if outputs is not None:
                    assert all(map(torch.equal, outputs, everyone))
                output = torch.empty(shape)
                pg.scatter(output, everyone if at_root else None, root)
                assert torch.equal(output, everyone[pg.rank()])
                flat = [each.flatten() if rank % 2 else each for rank, each in enumerate(everyone)]
                pg.scatter(output.zero_(), flat if at_root else None, root)
                assert torch.equal(output, everyone[pg.rank()])
        own = torch.tensor([1 + 2j, 3 - 1j]) * (1 + pg.rank())
        expected = own.conj().resolve_conj()
        pg.scatter(own, [own.conj()] * world_size if pg.rank() == 0 else None)  # its own memory, conjugated
        assert pg.rank() > 0 or torch.equal(own, expected)

    tenant.run(world_size, body)


def test_all_to_all(tenant: BackendCase, world_size: int) -> None:
    def rows(src: int, dst: int, scale: int) -> int:
        return (2 * src + dst) % 3 * scale

    def body(pg: ProcessGroup) -> None:
        me = pg.rank()
        for scale in (1, 150_000):
            sent = [
                example((rows(me, dst, scale), 2), torch.float32, me, salt=dst) for dst in range(world_size)
            ]
            expected = [
                example((rows(src, me, scale), 2), torch.float32, src, salt=me) for src in range(world_size)
            ]
            outputs = [torch.empty_like(tensor) for tensor in expected]
            pg.all_to_all(outputs, sent)
            assert all(map(torch.equal, outputs, expected))
            received = torch.empty_like(torch.cat(expected))
            pg.all_to_all_single(
                received,
                torch.cat(sent),
                [len(tensor) for tensor in expected],
                [len(tensor) for tensor in sent],
            )
            assert torch.equal(received, torch.cat(expected))

    tenant.run(world_size, body)


def test_all_to_all_single_in_equal_parts(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for numel in (0, 1, 3, 100_001):
            everyone = [example((world_size, numel), torch.float32, rank) for rank in range(world_size)]
            output = torch.empty(world_size, numel)
            pg.all_to_all_single(output, everyone[pg.rank()])
            assert torch.equal(output, torch.stack([tensor[pg.rank()] for tensor in everyone]))

    tenant.run(world_size, body)


def test_coalesced(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        shapes = ((3,), (), (0,), (2, 70_000))
        dtypes = (torch.float32, torch.float64, torch.float32, torch.int32)
        cases = list(zip(shapes, dtypes, strict=True))

        def of(rank: int) -> list[torch.Tensor]:
            return [example(shape, dtype, rank) for shape, dtype in cases]

        mine = of(pg.rank())
        pg.all_reduce_coalesced(mine)
        for column, tensor in zip(zip(*map(of, range(world_size)), strict=True), mine, strict=True):
            same(tensor, reduced(column, Reduction.of(ReduceOp.SUM)), tenant)

        wholes = [torch.empty((world_size, *shape), dtype=dtype) for shape, dtype in cases]
        pg.all_gather_single_coalesced(wholes, of(pg.rank()))
        for column, whole in zip(zip(*map(of, range(world_size)), strict=True), wholes, strict=True):
            assert torch.equal(whole, torch.stack(column))

        parts = [torch.empty(shape, dtype=dtype) for shape, dtype in cases]
        pg.reduce_scatter_single_coalesced(parts, wholes)
        for whole, part in zip(wholes, parts, strict=True):
            same(part, reduced([whole[pg.rank()]] * world_size, Reduction.of(ReduceOp.SUM)), tenant)

    tenant.run(world_size, body)


def test_outputs_over_inputs(tenant: BackendCase, world_size: int) -> None:
    """The result is that of inputs which lie elsewhere, wherever the outputs lie in the inputs' memory."""

    def body(pg: ProcessGroup) -> None:
        for numel, place in ((3, 0), (3, 1), (3000, -1), (70_001, 0), (70_001, 1), (70_001, -1)):
            values = [
                torch.arange(world_size * numel, dtype=torch.int32) * (r + 1) for r in range(world_size)
            ]
            slot = place % world_size
            at = slot * numel if place != 1 else world_size // 2  # a part's place, or across two of them
            everyone = [each.chunk(world_size) for each in values]
            mine = values[pg.rank()].clone()

            pg.all_gather_single(mine, mine[at : at + numel])
            assert torch.equal(mine, torch.cat([each[at : at + numel] for each in values]))
            mine = values[pg.rank()].clone()
            pg.reduce_scatter_single(mine[at : at + numel], mine)
            expected = torch.stack([each[pg.rank()] for each in everyone]).sum(0)
            assert torch.equal(mine[at : at + numel], expected)
            mine = values[pg.rank()].clone()
            pg.all_to_all_single(mine, mine)
            assert torch.equal(mine, torch.cat([each[pg.rank()] for each in everyone]))

            parts = [each.clone() for each in everyone[pg.rank()]]
            pg.all_gather(parts, parts[slot])
            assert all(map(torch.equal, parts, [each[slot] for each in everyone]))
            parts = [each.clone() for each in everyone[pg.rank()]]
            pg.reduce_scatter(parts[slot], parts)
            assert torch.equal(parts[slot], expected)
            parts = [each.clone() for each in everyone[pg.rank()]]
            pg.scatter(parts[slot], parts if pg.rank() == 0 else None)
            assert torch.equal(parts[slot], everyone[0][pg.rank()])
            parts = [each.clone() for each in everyone[pg.rank()]]
            pg.gather(parts if pg.rank() == 0 else None, parts[slot])
            assert pg.rank() or all(map(torch.equal, parts, [each[slot] for each in everyone]))
            parts = [each.clone() for each in everyone[pg.rank()]]
            outputs = parts[::-1] if place == 1 else parts
            pg.all_to_all(outputs, parts)
            assert all(map(torch.equal, outputs, [each[pg.rank()] for each in everyone]))

    tenant.run(world_size, body)


def test_barrier(tenant: BackendCase, world_size: int) -> None:
    arrived: list[int] = []

    def body(pg: ProcessGroup) -> None:
        for turn in range(1, 4):
            arrived.append(pg.rank())
            pg.barrier()
            assert len(arrived) >= turn * world_size
            pg.barrier(async_op=True).wait()

    tenant.run(world_size, body)


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
MOVED = (*DTYPES, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
_NUMBERS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def ops_of(dtype: torch.dtype) -> tuple[AnyReduceOp, ...]:
    if dtype is torch.bool:
        return (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *_BITS)
    if dtype.is_complex:
        return (ReduceOp.SUM, ReduceOp.AVG)
    if dtype.is_floating_point:
        return (*_NUMBERS, premul_sum(0.5))
    return (*_NUMBERS, *_BITS)


def test_dtypes_and_reductions(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for dtype in DTYPES:
            for op in ops_of(dtype):
                for numel in (3, 40_001):
                    everyone = [example((numel,), dtype, rank) for rank in range(world_size)]
                    mine = everyone[pg.rank()].clone()
                    try:
                        pg.all_reduce(mine, op)
                    except InvalidUsageError as error:
                        if not tenant.complete:
                            assert str(dtype) in str(error), error
                            continue
                        raise
                    same(mine, reduced(everyone, Reduction.of(op)), tenant)

    tenant.run(world_size, body)


def test_every_dtype_moves(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for dtype in MOVED:
            everyone = [example((5, 3), torch.float32, rank).abs().to(dtype) for rank in range(world_size)]
            mine = everyone[pg.rank()]
            outputs = [torch.empty_like(mine) for _ in range(world_size)]
            pg.all_gather(outputs, mine)
            for output, expected in zip(outputs, everyone, strict=True):
                assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8)), dtype
            copy = mine.clone()
            pg.broadcast(copy, world_size - 1)
            assert torch.equal(copy.view(torch.uint8), everyone[-1].view(torch.uint8)), dtype

    tenant.run(world_size, body)


LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "transposed": lambda dtype: torch.empty(5, 3, dtype=dtype).t(),
    "columns": lambda dtype: torch.empty(6, 8, dtype=dtype)[:, 2:5],
    "steps": lambda dtype: torch.empty(21, dtype=dtype)[::3],
    "one element of a column": lambda dtype: torch.empty(1, 4, dtype=dtype)[:, 1],
    "scalar in a row": lambda dtype: torch.empty(4, dtype=dtype)[2],
    "offset": lambda dtype: torch.empty(12, dtype=dtype)[5:],
    "permuted": lambda dtype: torch.empty(2, 7, 3, dtype=dtype).permute(2, 0, 1),
    "channels last": lambda dtype: torch.empty(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
    "nothing in columns": lambda dtype: torch.empty(4, 0, 3, dtype=dtype).transpose(0, 2),
}
"""Tensors with strides and offsets that programs pass."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(tenant: BackendCase, world_size: int, layout: str) -> None:
    def body(pg: ProcessGroup) -> None:
        last = world_size - 1
        for dtype in (torch.float32, torch.int32, torch.complex64, torch.bool):
            tensor, gathered = LAYOUTS[layout](dtype), [LAYOUTS[layout](dtype) for _ in range(world_size)]
            everyone = [example(tensor.shape, dtype, rank) for rank in range(world_size)]
            tensor.copy_(everyone[pg.rank()])
            pg.all_gather(gathered, tensor)
            assert all(map(torch.equal, gathered, everyone))
            if dtype is not torch.bool:
                pg.all_reduce(tensor)
                same(tensor, reduced(everyone, Reduction.of(ReduceOp.SUM)), tenant)
            tensor.copy_(everyone[pg.rank()])
            pg.broadcast(tensor, last)
            assert torch.equal(tensor, everyone[last])
            if pg.rank() == 0 and last:
                pg.send(gathered[0], last)
            elif pg.rank() == last and last:
                pg.recv(tensor, 0)
                assert torch.equal(tensor, everyone[0])

    tenant.run(world_size, body)


def test_tensors_that_require_grad(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.full((3,), float(pg.rank() + 1)))
        pg.all_reduce(parameter)
        assert parameter.requires_grad
        assert parameter.grad_fn is None
        total = world_size * (world_size + 1) / 2
        assert torch.equal(parameter.detach(), torch.full((3,), total))
        pg.broadcast(parameter, 0)
        whole = torch.empty(world_size * 3)
        pg.all_gather_single(whole, parameter)
        assert torch.equal(whole, torch.full((world_size * 3,), total))

    tenant.run(world_size, body)


def test_conjugated_views(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        everyone = [example((5,), torch.complex64, rank) for rank in range(world_size)]
        mine = everyone[pg.rank()].conj()
        outputs = [torch.empty_like(tensor) for tensor in everyone]
        pg.all_gather(outputs, mine)
        assert all(torch.equal(got, sent.conj()) for got, sent in zip(outputs, everyone, strict=True))
        view = everyone[pg.rank()].clone().conj()
        pg.all_reduce(view)
        total = reduced([tensor.conj().resolve_conj() for tensor in everyone], Reduction.of(ReduceOp.SUM))
        same(view, total, tenant)

    tenant.run(world_size, body)


def test_negated_views(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        everyone = [example((5,), torch.float32, rank) for rank in range(world_size)]
        mine = negated_view(everyone[pg.rank()].clone())
        outputs = [torch.empty(5) for _ in everyone]
        pg.all_gather(outputs, mine)
        assert all(torch.equal(got, -sent) for got, sent in zip(outputs, everyone, strict=True))
        pg.all_reduce(mine)
        total = reduced([-tensor for tensor in everyone], Reduction.of(ReduceOp.SUM))
        same(mine, total, tenant)

    tenant.run(world_size, body)
