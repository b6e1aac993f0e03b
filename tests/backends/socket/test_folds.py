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
from dist2.operation.kinds import AVG, MAX, SUM, Reduction, premul_sum

DTYPES = (
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
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


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two vectors have the same bits, except for the payloads of NaNs."""
    if left.is_complex():
        left, right = left.view(left.real.dtype), right.view(right.real.dtype)
    integers = {4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    equal = left.view(integers) == right.view(integers)
    if left.is_floating_point():
        equal |= left.isnan() & right.isnan()
    return bool(equal.all())


@pytest.mark.parametrize("reduction", [SUM, AVG, premul_sum(2.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_folds_are_those_of_torch_to_the_bit(board: Board, dtype: torch.dtype, reduction: Reduction) -> None:
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
                assert same(tensors[into], expected), (count, numel, into)


@pytest.mark.parametrize(
    ("reduction", "dtype", "count"),
    [(MAX, torch.float32, 2), (SUM, torch.bfloat16, 2), (SUM, torch.float32, MOST + 1)],
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
