"""`dist2.functional` in graphs of torch, and beside `torch.distributed.nn`."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional
import torch.utils.checkpoint
from support.processes import Crew
from support.training import WORLD, compiling, quiet
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

import dist2
from dist2 import ProcessGroup, ReduceOp, functional

Run = Callable[..., list[Any]]
Case = Callable[[torch.Tensor, ProcessGroup], torch.Tensor]
of_torch: Any = torch.distributed.nn.functional


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a callable that calls ``body(pg, *arguments)`` on two ranks, in processes that are kept."""
    crew = Crew(WORLD, tmp_path_factory.mktemp("crew"))
    yield functools.partial(crew.run, timeout=50.0)
    crew.close()


def mine(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(4, 2) * (rank + 1) + 1


TRACED: dict[str, Case] = {
    "all_reduce": lambda x, pg: functional.all_reduce(x, pg),
    "all_reduce, async_op": lambda x, pg: functional.wait(functional.all_reduce(x, pg, async_op=True)),
    "all_reduce, max": lambda x, pg: functional.all_reduce(x, pg, ReduceOp.MAX),
    "reduce": lambda x, pg: functional.reduce(x, pg, 1, ReduceOp.AVG),
    "broadcast": lambda x, pg: functional.broadcast(x, pg, 1),
    "all_gather": lambda x, pg: functional.all_gather(x, pg, dim=1),
    "all_gather, sizes": lambda x, pg: functional.all_gather(x[: pg.rank() + 1], pg, sizes=[1, 2]),
    "reduce_scatter": lambda x, pg: functional.reduce_scatter(x, pg, dim=1),
    "gather": lambda x, pg: functional.gather(x, pg, 1),
    "scatter": lambda x, pg: functional.scatter(x, pg, 1),
    "all_to_all": lambda x, pg: functional.all_to_all(x, pg, [2, 2], [2, 2]),
    "send and recv": lambda x, pg: (
        functional.send(x, pg, 1) + x.sum() if pg.rank() == 0 else functional.recv(x, pg, 0)
    ),
    "sendrecv": lambda x, pg: functional.sendrecv(x, pg, dst=1 - pg.rank(), src=1 - pg.rank()),
}


def forward_and_backward(function: Callable[[torch.Tensor], torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Return the result of a function and the gradient of its input."""
    x = mine(rank).requires_grad_()
    y = function(x)
    (y.square().sum() + y.sum()).backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def _aot_eager() -> Any:
    """Return torch's backend ``aot_eager`` without the import of torch's Inductor, which takes seconds."""
    return aot_autograd(fw_compiler=boxed_nop, partition_fn=default_partition)


def _torch_default() -> Any:
    """Return the same with the division into forward and backward pass that torch's backends use."""
    return aot_autograd(fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)


def _compiled(pg: ProcessGroup) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([case(x * 2, pg).flatten() for case in TRACED.values()]) + 1

    with quiet(), compiling():
        expected = forward_and_backward(step, pg.rank())
        compiled: Any = torch.compile(step, backend=_aot_eager(), fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(forward_and_backward(compiled, pg.rank()), expected)
        torch._dynamo.reset()


@pytest.mark.timeout(120)
def test_a_compiled_function_with_all_of_them_is_one_graph(run: Run) -> None:
    run(_compiled)


def _different_graphs(pg: ProcessGroup) -> None:
    root = pg.rank() == 0

    def unused_send(x: torch.Tensor) -> torch.Tensor:
        if root:
            functional.send(x * 2, pg, 1)
            return x + 1
        return functional.recv(x.detach(), pg, 0) + x

    def used_at_the_root(x: torch.Tensor) -> torch.Tensor:
        total = functional.reduce(x.detach(), pg, 0)
        return x.sin() + total if root else x.sin()  # the backward pass needs x

    def equal_arguments(x: torch.Tensor) -> torch.Tensor:
        if root:
            return x + functional.send(x, pg, 1) + functional.send(x * 3, pg, 1)
        return functional.recv(x, pg, 0) * 10 + functional.recv(x, pg, 0)

    with quiet(), compiling():
        for step in (unused_send, used_at_the_root, equal_arguments):
            compiled: Any = torch.compile(step, backend=_torch_default(), fullgraph=True)
            for requires_grad in (False, True):
                ours, theirs = (torch.ones(2, requires_grad=requires_grad) for _ in range(2))
                y, expected = compiled(ours), step(theirs)
                torch.testing.assert_close(y, expected, msg=step.__name__)
                if requires_grad:
                    y.sum().backward()
                    expected.sum().backward()
                    torch.testing.assert_close(ours.grad, theirs.grad, msg=step.__name__)
            torch._dynamo.reset()


def test_compiled_calls_remain_even_if_unused_or_equal(run: Run) -> None:
    run(_different_graphs)


def _empty_gradients(pg: ProcessGroup) -> None:
    pure = list[str]()

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        pure.extend(
            str(node.target)
            for node in graph.graph.nodes
            if "dist2" in str(node.target) and not node.is_impure() and node.meta["val"].numel() == 0
        )
        return boxed_nop(graph, inputs)

    def step(x: torch.Tensor) -> torch.Tensor:
        mine = x if pg.rank() == 0 else x[:0]
        return functional.scatter(x, pg, 0) + functional.all_to_all(
            mine, pg, [2, 0], [2, 2] if len(mine) else [0, 0]
        )

    with quiet(), compiling():
        partition = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward, partition_fn=partition)
        compiled: Any = torch.compile(step, backend=backend, fullgraph=True)
        torch.testing.assert_close(
            forward_and_backward(compiled, pg.rank()), forward_and_backward(step, pg.rank())
        )
        assert not pure
        torch._dynamo.reset()


def test_calls_without_elements_remain_in_compiled_backward_passes(run: Run) -> None:
    run(_empty_gradients)


def _checkpointed(pg: ProcessGroup) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x.sin(), pg).cos()

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return y

    with quiet(), compiling():
        expected = forward_and_backward(step, pg.rank())
        compiled: Any = torch.compile(step, backend=_torch_default(), fullgraph=True)
        torch.testing.assert_close(forward_and_backward(compiled, pg.rank()), expected)
        torch._dynamo.reset()


def test_checkpointed_layers_can_be_compiled(run: Run) -> None:
    run(_checkpointed)


class Layer(nn.Module):
    """Uses each function that has the same shapes on both ranks."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self.pg = pg

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x, self.pg, ReduceOp.MAX) + functional.broadcast(x, self.pg)
        y = functional.reduce_scatter(functional.all_gather(y, self.pg), self.pg)
        return functional.all_to_all(y, self.pg)


def _exported(pg: ProcessGroup, strict: bool) -> Any:
    with quiet(), compiling():
        x, layer = mine(pg.rank()), Layer(pg)
        program = torch.export.export(layer, (x,), strict=strict)
        assert "torch.ops.dist2.all_gather" in str(program.graph)
        saved = io.BytesIO()
        torch.export.save(program, saved)
        saved.seek(0)
        torch.testing.assert_close(torch.export.load(saved).module()(x), layer(x))
        return str(program.graph)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_the_same_on_all_ranks(run: Run, strict: bool) -> None:
    first, second = run(_exported, strict)
    assert first == second


def _wrong_size(pg: ProcessGroup) -> None:
    with quiet(), compiling():
        program = torch.export.export(Layer(pg), (mine(pg.rank()),)).module()
        name = pg.info.name
        alone = pg.split([pg.rank()], name="alone")
        pg.shutdown()
        with (
            alone,
            dist2.new_group("fake", rank=0, world_size=3, name=name),
            pytest.raises(dist2.InvalidUsageError, match=r"for 2 ranks, and group .* has 3"),
        ):
            program(mine(0))


def test_a_program_of_another_world_size_is_refused(run: Run) -> None:
    run(_wrong_size)


def _beside_torch(pg: ProcessGroup) -> None:
    rank = pg.rank()
    pairs: dict[str, tuple[Case, Callable[[torch.Tensor], torch.Tensor]]] = {
        "all_reduce": (functional.all_reduce, lambda x: of_torch.all_reduce(x, group=pg)),
        "broadcast": (functional.broadcast, lambda x: of_torch.broadcast(x, 0, group=pg)),
        "all_gather": (functional.all_gather, lambda x: torch.cat(of_torch.all_gather(x, group=pg))),
        "reduce_scatter": (
            functional.reduce_scatter,
            lambda x: of_torch.reduce_scatter(torch.empty(2, 2), list(x.chunk(2)), group=pg),
        ),
        "scatter": (
            functional.scatter,
            lambda x: of_torch.scatter(list(x.chunk(2)), 0, group=pg),
        ),
        "gather": (
            functional.gather,
            lambda x: torch.cat(of_torch.gather(x, 0, group=pg))[: 8 if rank == 0 else 0],
        ),
        "all_to_all": (
            functional.all_to_all,
            lambda x: of_torch.all_to_all_single(torch.empty(4, 2), x, group=pg),
        ),
        "reduce": (
            functional.reduce,
            lambda x: of_torch.reduce(x, 0, group=pg) * (rank == 0),
        ),
    }
    with quiet(pg):
        for name, (ours, theirs) in pairs.items():
            expected = forward_and_backward(theirs, rank)
            actual = forward_and_backward(lambda x, ours=ours: ours(x, pg), rank)
            torch.testing.assert_close(actual, expected, msg=name)


def test_results_and_gradients_are_those_of_torch_distributed_nn(run: Run) -> None:
    run(_beside_torch)


def _forward_mode(pg: ProcessGroup) -> None:
    cases: dict[str, Case] = {
        **TRACED,
        "all_reduce, product": lambda x, pg: functional.all_reduce(x, pg, ReduceOp.PRODUCT),
        "all_reduce, async_op, min": lambda x, pg: functional.all_reduce(x, pg, ReduceOp.MIN, async_op=True),
        "reduce, premul_sum": lambda x, pg: functional.reduce(x, pg, 1, dist2.premul_sum(0.25)),
        "reduce, max": lambda x, pg: functional.reduce(x, pg, 1, ReduceOp.MAX),
        "reduce_scatter, max": lambda x, pg: functional.reduce_scatter(x, pg, ReduceOp.MAX),
    }
    x = mine(pg.rank()).double() + pg.rank() / 2  # no two ranks have equal values
    way = x.cos()
    whirled = (torch.complex(x, way), torch.complex(way, -x))
    inputs = [(name, case, x, way) for name, case in cases.items()]
    inputs.append(("complex product", cases["all_reduce, product"], *whirled))
    for name, case, x, way in inputs:
        ahead, behind = case(x + 1e-4 * way, pg), case(x - 1e-4 * way, pg)
        _, tangent = torch.func.jvp(lambda x, case=case: case(x, pg), (x,), (way,))
        torch.testing.assert_close(tangent, (ahead - behind) / 2e-4, rtol=1e-6, atol=1e-6, msg=name)
    curves = torch.func.hessian(lambda x: functional.all_reduce(x, pg).square().sum())(torch.ones(2))
    assert curves.tolist() == [[8.0, 0.0], [0.0, 8.0]]  # all ranks' inputs change, and so do all losses


def test_forward_mode_is_that_of_finite_differences(run: Run) -> None:
    run(_forward_mode)
