"""`dist2.functional` on each CPU backend: gradients against finite differences, `torch.func`, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import TENANTS, Tenant, run_ranks

import dist2
import dist2.functional as functional
from dist2 import InvalidUsageError, ProcessGroup, ReduceOp

WORLD = 3
STEP = 1e-4
Function = Callable[[torch.Tensor, ProcessGroup], torch.Tensor]


def message(x: torch.Tensor, pg: ProcessGroup) -> torch.Tensor:
    if pg.rank() == 0:
        return functional.send(x, pg, dst=2, tag=5)
    return functional.recv(x, pg, src=0, tag=5) if pg.rank() == 2 else x * 2


def around(x: torch.Tensor, pg: ProcessGroup) -> torch.Tensor:
    rank, size = pg.rank(), pg.size()
    return functional.sendrecv(x * x, pg, dst=(rank + 1) % size, src=(rank - 1) % size)


def uneven(x: torch.Tensor, pg: ProcessGroup) -> torch.Tensor:
    """Rank r sends r + 1 rows to each rank."""
    mine = x[: 3 * (pg.rank() + 1)] if x.shape[0] >= 9 else x.repeat(3, 1)[: 3 * (pg.rank() + 1)]
    return functional.all_to_all(mine, pg, [1, 2, 3], [pg.rank() + 1] * 3)


REDUCTIONS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "premul_sum": dist2.premul_sum(0.25),
}


def of_reduction(op: Any) -> dict[str, Function]:
    return {
        "all_reduce": lambda x, pg: functional.all_reduce(x, pg, op),
        "reduce": lambda x, pg: functional.reduce(x, pg, 1, op),
        "reduce_scatter": lambda x, pg: functional.reduce_scatter(x, pg, op),
        "reduce_scatter, sizes": lambda x, pg: functional.reduce_scatter(x, pg, op, sizes=[1, 3, 2]),
    }


CASES: dict[str, Function] = {
    **{f"{case}, {word}": f for word, op in REDUCTIONS.items() for case, f in of_reduction(op).items()},
    "reduce_scatter, dim 1": lambda x, pg: functional.reduce_scatter(x.t(), pg, dim=1),
    "broadcast": lambda x, pg: functional.broadcast(x, pg, 2),
    "all_gather": lambda x, pg: functional.all_gather(x, pg),
    "all_gather, dim -1": lambda x, pg: functional.all_gather(x, pg, dim=-1),
    "all_gather, one element": lambda x, pg: functional.all_gather(x.sum(), pg),
    "all_gather, sizes": lambda x, pg: functional.all_gather(x[: pg.rank() + 1], pg, sizes=[1, 2, 3]),
    "gather": lambda x, pg: functional.gather(x, pg, 1),
    "gather, dim 1": lambda x, pg: functional.gather(x, pg, 1, dim=1),
    "scatter": lambda x, pg: functional.scatter(x, pg, 1),
    "scatter, dim 1": lambda x, pg: functional.scatter(x.t(), pg, 1, dim=1),
    "all_to_all": lambda x, pg: functional.all_to_all(x, pg),
    "all_to_all, sizes": uneven,
    "send and recv": message,
    "sendrecv": around,
}


def mine(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.rand(6, 2, generator=generator, dtype=dtype) + 0.5


def weights(like: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the weights of a rank's result in the loss of all ranks."""
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.rand(like.shape, generator=generator, dtype=like.dtype)


def total(value: torch.Tensor, pg: ProcessGroup) -> float:
    whole = value.detach().reshape(1).clone()
    pg.all_reduce(whole)
    return whole.item()


def check_gradient(
    name: str, function: Function, pg: ProcessGroup, dtype: torch.dtype = torch.float64
) -> None:
    """Compare the change of the loss of all ranks along a direction with that which the gradients tell."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = function(x, pg)
        return (y * weights(y, pg.rank())).sum().real

    x = mine(pg.rank(), dtype).requires_grad_()
    before = x.detach().clone()
    loss(x).backward()
    assert torch.equal(x, before), "the input was changed"
    assert x.grad is not None
    way = weights(x, 7 + pg.rank())
    with torch.no_grad():
        change = total(loss(before + STEP * way), pg) - total(loss(before - STEP * way), pg)
    assert total((x.grad.conj() * way).sum().real, pg) == pytest.approx(
        change / (2 * STEP), rel=1e-4, abs=1e-6
    ), name


@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_gradients_are_those_of_finite_differences(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        for name, function in CASES.items():
            check_gradient(name, function, pg)

    run_ranks(WORLD, body, tenant)


COMPLEX = {
    **of_reduction(ReduceOp.SUM),
    **{f"{case}, product": function for case, function in of_reduction(ReduceOp.PRODUCT).items()},
}


def test_gradients_of_complex_numbers() -> None:
    def body(pg: ProcessGroup) -> None:
        for name, function in COMPLEX.items():
            check_gradient(name, function, pg, torch.complex128)

    run_ranks(WORLD, body, TENANTS[0])


def test_products_with_zeros_and_equal_maxima() -> None:
    def body(pg: ProcessGroup) -> None:
        values = [[0.0, 0.0, 2.0], [3.0, 0.0, 5.0], [4.0, 6.0, 7.0]][pg.rank()]
        x = torch.tensor(values, requires_grad=True)
        functional.reduce(x, pg, 0, ReduceOp.PRODUCT).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[12.0, 0.0, 35.0], [0.0, 0.0, 14.0], [0.0, 0.0, 10.0]][pg.rank()]
        x = torch.tensor([1j * each for each in values], requires_grad=True)
        functional.reduce(x, pg, 0, ReduceOp.PRODUCT).real.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[-12, 0, -35], [0, 0, -14], [0, 0, -10]][pg.rank()]
        x = torch.tensor([1.0, float(pg.rank() > 0)], requires_grad=True)
        functional.all_reduce(x, pg, ReduceOp.MAX).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([1.0, 1.5 * (pg.rank() > 0)])

    run_ranks(WORLD, body, TENANTS[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, pg: functional.all_gather(x, pg),
        lambda x, pg: functional.reduce_scatter(x, pg),
        lambda x, pg: functional.gather(x, pg, 1),
        lambda x, pg: functional.scatter(x, pg, 1),
        lambda x, pg: functional.all_to_all(x, pg),
    ],
    ids=["all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"],
)
def test_no_rows(function: Function) -> None:
    def body(pg: ProcessGroup) -> None:
        x = torch.empty(0, 3, requires_grad=True)
        y = function(x, pg)
        assert y.shape == (0, 3)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (0, 3)

    run_ranks(2, body, TENANTS[0])


def test_second_derivatives() -> None:
    def body(pg: ProcessGroup) -> None:
        x = torch.tensor([2.0 + pg.rank()], requires_grad=True)
        (slope,) = torch.autograd.grad(functional.all_reduce(x**3, pg).sum(), x, create_graph=True)
        assert slope.item() == 3 * 3 * x.item() ** 2
        (curve,) = torch.autograd.grad(slope.sum(), x)
        assert curve.item() == 3 * 6 * x.item()

    run_ranks(WORLD, body, TENANTS[0])


def test_torch_func() -> None:
    def body(pg: ProcessGroup) -> None:
        x = mine(pg.rank())
        slope = torch.func.grad(lambda x: functional.all_reduce(x, pg).square().sum())(x)
        y = functional.all_reduce(x, pg)
        torch.testing.assert_close(slope, 2 * WORLD * y)
        for name, function in CASES.items():
            if "sizes" not in name and name != "send and recv":
                batch = torch.stack([x, 2 * x])
                each = torch.stack([function(x, pg), function(2 * x, pg)])
                torch.testing.assert_close(torch.vmap(lambda x, f=function: f(x, pg))(batch), each, msg=name)
        batch = torch.stack([x, 2 * x])
        slopes = torch.vmap(torch.func.grad(lambda x: functional.all_gather(x, pg).square().sum()))(batch)
        torch.testing.assert_close(slopes, 2 * WORLD * batch)

    run_ranks(WORLD, body, TENANTS[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f, x, pg: f.all_reduce([1.0], pg), "x must be a tensor, got [1.0] (list)"),
        (lambda f, x, pg: f.all_reduce(x.to_sparse(), pg), "got layout torch.sparse_coo: pass x.to_dense()"),
        (lambda f, x, pg: f.all_reduce(x.numpy(), pg), "(ndarray): pass torch.from_dlpack(x)"),
        (lambda f, x, pg: f.all_reduce(x, "world"), "pg must be a dist2.ProcessGroup, got 'world' (str)"),
        (lambda f, x, pg: f.all_reduce(x, pg, "sum"), "op must be a ReduceOp, got 'sum' (str): pass"),
        (lambda f, x, pg: f.broadcast(x, pg, 9), "root"),
        (lambda f, x, pg: f.all_gather(x, pg, sizes=[6]), "sizes must have one entry for each of 2 ranks"),
        (lambda f, x, pg: f.all_gather(x, pg, sizes=[1, 1]), "is 1 rows, but x has 6"),
        (lambda f, x, pg: f.reduce_scatter(x[:5], pg), "dimension 0 of x has size 5"),
        (lambda f, x, pg: f.reduce_scatter(x, pg, sizes=[3, 2]), "sizes is 5 rows, but x has 6"),
        (lambda f, x, pg: f.reduce_scatter(x, pg, sizes=[7, -1]), "sizes must not be negative"),
        (lambda f, x, pg: f.scatter(x.sum(), pg), "x has no dimensions"),
        (lambda f, x, pg: f.reduce_scatter(x.sum(), pg), "x has no dimensions"),
        (lambda f, x, pg: f.reduce_scatter(x.sum(), pg, sizes=[1, 0]), "x has no dimensions"),
        (lambda f, x, pg: f.all_to_all(x.sum(), pg), "x has no dimensions"),
        (lambda f, x, pg: f.all_to_all(x.sum(), pg, [1, 0], [1, 0]), "x has no dimensions"),
        (lambda f, x, pg: f.all_to_all(x, pg, [3, 3]), "pass both, or neither"),
        (lambda f, x, pg: f.all_reduce(x, pg, ReduceOp.PREMUL_SUM), "or dist2.premul_sum(factor)"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[..., Any], words: str) -> None:
    def body(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError) as caught:
            call(functional, mine(pg.rank()), pg)
        assert words in str(caught.value)
        pg.barrier()

    run_ranks(2, body, TENANTS[0])


def test_a_backward_pass_after_the_end_of_the_group() -> None:
    with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1, name="short") as pg:
        y = functional.all_reduce(torch.ones(2, requires_grad=True), pg)
    with pytest.raises(dist2.GroupAbortedError, match="'short' was shut down in this process"):
        functional.all_reduce(torch.ones(2), pg)
    with pytest.raises(InvalidUsageError, match="no open group of this process has the name 'short'"):
        y.sum().backward()


def test_a_name_of_a_method_leads_to_the_function() -> None:
    for name, instead in functional._INSTEAD.items():
        assert instead in functional.__all__
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': use {instead}$"):
            getattr(functional, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        functional.nothing  # type: ignore[attr-defined]  # noqa: B018
