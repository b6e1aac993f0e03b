"""Folds of the core beside those of torch: equal bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.boards import Members, operation
from support.scripts import plan_for, script_on, tensor

from dist2.backends.socket.lowering import add_fold
from dist2.backends.socket.reduction import Folding
from dist2.backends.socket.transport.boards.board import Board
from dist2.operation.kinds import AVG, MAX, SUM, ReduceOp, Reduction, premul_sum

DTYPES = (
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bfloat16,
)
MIN, PRODUCT = Reduction.of(ReduceOp.MIN), Reduction.of(ReduceOp.PRODUCT)
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    5e-324,
    1e-310,
    1e-40,
    -1e-45,
    3.4e38,
    1.7e308,
]
MOST = 64
"""Vectors that the core folds at a time."""


@pytest.fixture
def board() -> Iterator[Board]:
    made = Members(1)
    yield made.boards[0]
    made.close()


def vectors(dtype: torch.dtype, count: int, numel: int) -> list[torch.Tensor]:
    """Return vectors of any bits, with all pairs of special values among them."""
    bits = torch.randint(0, 256, (count, numel * dtype.itemsize), dtype=torch.uint8)
    made = list(bits.view(dtype).unbind())
    if dtype.is_complex or dtype.is_floating_point:
        real = [vector.view(vector.real.dtype) if dtype.is_complex else vector for vector in made]
        special = torch.tensor(SPECIAL, dtype=torch.float64).to(real[0].dtype)
        pairs = torch.cartesian_prod(special, special)
        for at, vector in enumerate(real):
            vector[: len(pairs)] = pairs[:, at % 2]
    return made


def same(left: torch.Tensor, right: torch.Tensor, any_zero: bool = False) -> bool:
    """Whether vectors have the same bits, except for payloads of NaNs, and perhaps the signs of zeros."""
    if left.is_complex():
        left, right = left.view(left.real.dtype), right.view(right.real.dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    equal = left.view(integers) == right.view(integers)
    if left.is_floating_point():
        equal |= left.isnan() & right.isnan()
    if any_zero:
        equal |= (left == 0) & (right == 0)
    return bool(equal.all())


CASES = [
    (reduction, dtype)
    for reduction in (SUM, AVG, premul_sum(2.0), MIN, MAX)
    for dtype in DTYPES
    if reduction not in (MIN, MAX) or not (dtype.is_complex or dtype in (torch.uint32, torch.uint64))
]


@pytest.mark.parametrize(("reduction", "dtype"), CASES, ids=str)
def test_folds_are_those_of_torch_to_the_bit(board: Board, reduction: Reduction, dtype: torch.dtype) -> None:
    any_zero = reduction in (MIN, MAX)
    for count in (2, 3, 4, 5, 6, 8, 9, 10, 13, 16, 17, MOST):
        fold = Folding.of(reduction, dtype, count)
        if fold.native is None:
            assert reduction is AVG
            assert not (dtype.is_floating_point or dtype.is_complex)
            continue
        for numel in (1, 7, 1500):
            srcs = [src[:numel] for src in vectors(dtype, count, max(numel, 150))]
            expected = torch.empty_like(srcs[0])
            fold.function(expected, [src.clone() for src in srcs])
            for into in (count, 0, count - 1):  # elsewhere, over the first, over the last
                tensors = [src.clone() for src in srcs] + [torch.empty_like(expected)]
                plan = plan_for(0, (), tensors)
                places = [tensor(each) for each in (into, *range(count))]
                plan.fold(fold.native, fold.divisor, places[0], places[1:], expected.nbytes)
                script, host = script_on(board, plan)
                script.run(operation(0), (), tensors)
                assert not host.done
                assert same(tensors[into], expected, any_zero), (count, numel, into)


@pytest.mark.parametrize("reduction", [SUM, AVG, MIN, MAX], ids=str)
def test_all_values_of_bfloat16_are_folded_as_torch_does(board: Board, reduction: Reduction) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    tensors = [every[torch.randperm(len(every))].view(torch.bfloat16) for _ in range(3)]
    fold, expected = Folding.of(reduction, torch.bfloat16, 2), torch.empty_like(tensors[2])
    fold.function(expected, tensors[:2])
    plan = plan_for(0, (), tensors)
    plan.fold(fold.native, fold.divisor, tensor(2), [tensor(0), tensor(1)], expected.nbytes)
    script_on(board, plan)[0].run(operation(0), (), tensors)
    assert same(tensors[2], expected, reduction in (MIN, MAX))


@pytest.mark.parametrize(
    ("reduction", "dtype", "count"),
    [(PRODUCT, torch.float32, 2), (SUM, torch.float16, 2), (SUM, torch.float32, MOST + 1)],
)
def test_what_the_core_does_not_fold_is_left_to_torch(
    board: Board, reduction: Reduction, dtype: torch.dtype, count: int
) -> None:
    tensors = [torch.ones(3, dtype=dtype) for _ in range(count + 1)]
    plan = plan_for(0, (), tensors)
    fold = Folding.of(reduction, dtype, count)
    add_fold(plan, fold, dtype, [tensor(each) for each in (count, *range(count))], 3)
    script, host = script_on(board, plan)
    found: list[list[int]] = []
    host.act = lambda script, at: found.append(script.addresses(at))
    script.run(operation(0), (), tensors)
    assert [payload.function for _, payload in host.done] == [fold.function]
    assert found == [[tensors[each].data_ptr() for each in (count, *range(count))]]


@pytest.mark.parametrize("threads", [1, 2])
def test_long_vectors_are_torchs_where_it_has_several_threads(board: Board, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fold, left = Folding.of(SUM, torch.float32, 2), []
        for numel in (1 << 15, (1 << 15) + 1):
            tensors = [torch.zeros(numel) for _ in range(3)]
            plan = plan_for(0, (), tensors)
            add_fold(plan, fold, torch.float32, [tensor(2), tensor(0), tensor(1)], numel)
            script, host = script_on(board, plan)
            script.run(operation(0), (), tensors)
            left.append(len(host.done))
    finally:
        torch.set_num_threads(before)
    assert left == [0, int(threads > 1)]
