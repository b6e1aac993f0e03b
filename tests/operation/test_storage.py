"""Tensors without memory of their own are refused by name, and results on their way are waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from support.ranks import TENANTS, run_ranks

import dist2
from dist2 import InvalidUsageError, ProcessGroup

INPROC, SHM = TENANTS[0], TENANTS[2]


class Pair(torch.Tensor):
    """A tensor that stands for two others, as DTensor stands for its parts."""

    @staticmethod
    def __new__(cls, first: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no types for it
        raise NotImplementedError(func)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def inside(transform: Callable[..., Any]) -> Callable[[ProcessGroup], None]:
    def call(pg: ProcessGroup) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            pg.all_reduce(y)
            return y.sum()

        transform(step)(torch.ones(3))

    return call


CASES: dict[str, tuple[str, Callable[[ProcessGroup], object]]] = {
    "wrapper": ("tensor is a Pair, a wrapper without storage", lambda pg: pg.all_reduce(Pair(torch.ones(3)))),
    "of a list": (
        r"outputs\[1\] is a Pair",
        lambda pg: pg.all_gather([torch.ones(3), Pair(torch.ones(3))], torch.ones(3)),
    ),
    "sent": ("tensor is a Pair", lambda pg: pg.send(Pair(torch.ones(3)), pg.rank())),
    "freed": (r"shape \[3\] but no memory: its storage was freed", lambda pg: pg.all_reduce(freed())),
    "freed, sent": ("storage was freed", lambda pg: pg.send(freed(), pg.rank())),
    "zeros": ("no memory", lambda pg: pg.all_reduce(torch._efficientzerotensor(3))),
    "grad": ("no memory.*transform", inside(torch.func.grad)),
    "functionalized": ("no memory.*transform", inside(torch.func.functionalize)),
}


@pytest.mark.parametrize("tenant", [INPROC, SHM], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_has_no_memory_is_refused(case: str, tenant: Any) -> None:
    words, call = CASES[case]

    def body(pg: ProcessGroup) -> None:
        if pg.name() == "socket":
            pg.send(torch.ones(3), pg.rank())  # a plan for calls of this shape is there
            pg.recv(torch.ones(3), pg.rank())
        for _ in range(2):
            pg.all_reduce(torch.ones(3))
            with pytest.raises(InvalidUsageError, match=words):
                call(pg)
        pg.all_reduce(total := torch.ones(3))
        assert total.tolist() == [2.0] * 3

    run_ranks(2, body, tenant)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_are_refused() -> None:
    tensor: Any = torch._empty_affine_quantized([3], scale=0.5, zero_point=0, dtype=torch.quint8)

    def body(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError, match="tensor is quantized, and its scale would not travel"):
            pg.broadcast(tensor)

    run_ranks(1, body, INPROC)


def on_its_way(value: float) -> torch.Tensor:
    made: torch.Tensor = funcol.AsyncCollectiveTensor(torch.full((3,), value))
    return made


@pytest.mark.parametrize("tenant", [INPROC, SHM], ids=str)
def test_results_of_functional_collectives_are_waited_for(tenant: Any) -> None:
    def body(pg: ProcessGroup) -> None:
        for _ in range(2):
            total, alone = on_its_way(pg.rank() + 1.0), on_its_way(1.0)
            pg.all_reduce(torch.ones(3))
            pg.all_reduce(total)
            pg.all_reduce(alone, async_op=True).wait()
            parts = [torch.zeros(3), on_its_way(0.0)]
            pg.all_gather(parts, on_its_way(pg.rank() + 5.0))
            assert (total + 0).tolist() == [3.0] * 3
            assert (alone + 0).tolist() == [2.0] * 3
            assert [(part + 0).tolist() for part in parts] == [[5.0] * 3, [6.0] * 3]

    run_ranks(2, body, tenant)


def test_a_group_without_peers_takes_what_has_no_memory() -> None:
    with dist2.new_group("fake", rank=0, world_size=4) as pg:
        pg.all_reduce(Pair(torch.ones(3)))
        pg.all_reduce(torch.ones(3, device="meta"))
