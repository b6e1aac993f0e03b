"""Calls in dispatch modes and transforms of torch: tensors with memory are taken, and no mode sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import Tenant, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode

from dist2 import InvalidUsageError, ProcessGroup

TENANTS = (
    Tenant("inproc", "socket", {"transport": "inproc"}),
    Tenant("tcp", "socket", {"transport": "tcp"}),
    Tenant("shm", "socket", {"transport": "shm"}),
    Tenant("hosts", "socket", layout=(0, 1)),
    Tenant("gloo", "gloo"),
)
ON_ALL = pytest.mark.parametrize("tenant", TENANTS, ids=str)


def pass_on(pg: ProcessGroup, tensor: torch.Tensor) -> None:
    if pg.rank() == 0:
        pg.send(tensor, 1)
    else:
        pg.recv(tensor, 0, async_op=True).wait()


Make = Callable[[torch.Tensor], Any]
Call = Callable[[ProcessGroup, Any], Any]
CALLS: dict[str, tuple[Make, Call]] = {
    "all_reduce": (torch.clone, lambda pg, tensor: pg.all_reduce(tensor)),
    "large": (lambda tensor: tensor.repeat(40_000), lambda pg, tensor: pg.all_reduce(tensor)),
    "bfloat16": (torch.Tensor.bfloat16, lambda pg, tensor: pg.all_reduce(tensor)),
    "strided": (lambda tensor: tensor.repeat(2, 1).t()[::2], lambda pg, tensor: pg.all_reduce(tensor)),
    "average": (torch.clone, lambda pg, tensor: pg.all_reduce(tensor, ReduceOp.AVG)),
    "async": (torch.clone, lambda pg, tensor: pg.all_reduce(tensor, async_op=True).wait()),
    "sparse": (torch.Tensor.to_sparse, lambda pg, tensor: pg.all_reduce(tensor)),
    "all_to_all_single": (
        lambda tensor: (tensor.clone(), tensor),
        lambda pg, pair: pg.all_to_all_single(*pair),
    ),
    "message": (torch.clone, pass_on),
    "strided message": (lambda tensor: tensor.repeat(2)[::2], pass_on),
    "objects": (torch.clone, lambda pg, tensor: pg.all_gather_object({"tensor": tensor})),
    "one object": (torch.clone, lambda pg, tensor: pg.broadcast_object({"tensor": tensor})),
    "split_by": (torch.clone, lambda pg, tensor: pg.split_by(0).all_reduce(tensor)),
}
"""How the argument is made, outside of the mode, and a call on it."""


class Seen(TorchDispatchMode):
    """Keeps the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def in_fake_mode(call: Callable[[], Any]) -> Any:
    with FakeTensorMode():
        return call()


def in_gradient(call: Callable[[], Any]) -> Any:
    found = []

    def run(factor: torch.Tensor) -> torch.Tensor:
        found.append(call())
        return factor.sum()

    torch.func.grad(run)(torch.ones(2))
    return found[0]


def in_functionalization(call: Callable[[], Any]) -> Any:
    found = []

    def run(tensor: torch.Tensor) -> torch.Tensor:
        found.append(call())
        return tensor + 1

    torch.func.functionalize(run)(torch.ones(2))
    return found[0]


def in_vmap(call: Callable[[], Any]) -> Any:
    found = []

    def run(tensor: torch.Tensor) -> torch.Tensor:
        found.append(call())
        return tensor + 1

    torch.func.vmap(run)(torch.ones(3, 2))
    return found[0]


MODES = (in_fake_mode, in_gradient, in_functionalization, in_vmap)


def results(pg: ProcessGroup, mode: Callable[[Callable[[], Any]], Any]) -> dict[str, str]:
    found = {}
    for name, (make, call) in CALLS.items():
        argument = make(torch.arange(8.0) + 10 * pg.rank())
        returned = mode(lambda call=call, argument=argument: call(pg, argument))
        found[name] = repr((argument, returned if "object" in name else None))
    return found


@ON_ALL
@pytest.mark.parametrize("mode", MODES)
def test_calls_in_a_mode_have_the_results_of_calls_outside(tenant: Tenant, mode: Callable[..., Any]) -> None:
    def body(pg: ProcessGroup) -> None:
        inside = results(pg, mode)  # first: what is kept for later calls is made in the mode
        assert inside == results(pg, lambda call: call())

    run_ranks(2, body, tenant)


@ON_ALL
def test_modes_see_nothing_of_a_call(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        seen = Seen()

        def watched(call: Callable[[], Any]) -> Any:
            with seen:
                return call()

        results(pg, watched)
        assert not seen.operations

    run_ranks(2, body, tenant)


@ON_ALL
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_of_a_mode_are_refused(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        with FakeTensorMode():
            fake = torch.ones(3)
            with pytest.raises(InvalidUsageError, match="tensor is a FakeTensor"):
                pg.all_reduce(fake)
            with pytest.raises(
                InvalidUsageError, match=r"obj\['fake'\] cannot travel safely: type FakeTensor"
            ):
                pg.all_gather_object({"fake": fake})

        def run(tensor: torch.Tensor) -> torch.Tensor:
            with pytest.raises(InvalidUsageError, match="only inside a transform"):
                pg.all_reduce(tensor)
            with pytest.raises(
                InvalidUsageError, match=r"obj\[0\] cannot travel safely: a tensor without memory"
            ):
                pg.all_gather_object([tensor])
            return tensor.sum()

        for transform in (torch.func.grad, torch.func.functionalize):
            transform(run)(torch.ones(3))
        reduced = torch.ones(1)
        pg.all_reduce(reduced)
        assert reduced.item() == 2

    run_ranks(2, body, tenant)
