"""Calls in modes and transforms of torch that make tensors without memory: refused where they need memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import SOCKETS, Tenant, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dist2 import Dist2Error, InvalidUsageError, ProcessGroup

TENANTS = (*SOCKETS, Tenant("gloo", "gloo"))
ON_ALL = pytest.mark.parametrize("tenant", TENANTS, ids=str)


@ON_ALL
@pytest.mark.parametrize("numel", [6, 100_000])
def test_memory_made_in_a_mode_is_not_used(tenant: Tenant, numel: int) -> None:
    def body(pg: ProcessGroup) -> str:
        tensor = torch.full((numel,), pg.rank() + 1.0)
        try:
            with FakeTensorMode() if pg.rank() == 0 else nullcontext():  # it has state that threads share
                pg.all_reduce(tensor)
        except Exception as error:  # noqa: BLE001 - the test looks at its words
            return str(error)
        return "" if torch.equal(tensor, torch.full((numel,), 3.0)) else f"wrong: {tensor}"

    said = run_ranks(2, body, tenant)[0]
    ours, of_torch = (
        "a mode or transform of torch makes tensors that are no memory (FakeTensor",
        "convert all Tensors to FakeTensors",
    )
    assert not said or ours in said or of_torch in said


class OnMeta(TorchDispatchMode):
    """Has new tensors on the device meta, wherever they were asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if "device" in options:
            options["device"] = "meta"
        return func(*args, **options)


@ON_ALL
def test_tensors_on_meta_are_not_used_as_memory(tenant: Tenant) -> None:
    """The transport by shared memory makes none; the others refuse the calls, and run them outside."""

    def body(pg: ProcessGroup) -> None:
        own, both = torch.full((6,), pg.rank() + 1.0), [torch.zeros(6), torch.zeros(6)]
        columns = torch.ones(6, 2).t()
        calls: list[Callable[[], object]] = [
            lambda: pg.all_reduce(columns),
            lambda: pg.all_reduce(columns.bfloat16()),
            lambda: pg.all_to_all(both, [own, own]),
            lambda: pg.all_reduce(own),
        ]
        for call in calls:
            try:
                with OnMeta():
                    call()
            except InvalidUsageError as error:
                assert "no memory (Tensor on meta)" in str(error)
                call()
        assert torch.equal(columns, torch.full((2, 6), 2.0))
        assert torch.equal(torch.stack(both), torch.tensor([[1.0], [2.0]]).expand(2, 6))
        assert torch.equal(own, torch.full((6,), 3.0))

    run_ranks(2, body, tenant)


@ON_ALL
@pytest.mark.parametrize("numel", [6, 100_000])
def test_memory_made_in_a_transform_is_not_used(tenant: Tenant, numel: int) -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch.full((numel,), pg.rank() + 1.0)

        def call(other: torch.Tensor) -> torch.Tensor:
            pg.all_reduce(tensor)
            return other + 1

        try:
            torch.func.functionalize(call)(torch.ones(2))
        except Dist2Error as error:
            assert "makes tensors that are no memory" in str(error)
        else:
            assert torch.equal(tensor, torch.full((numel,), 3.0))

    run_ranks(2, body, tenant)


@ON_ALL
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused(tenant: Tenant) -> None:
    def refused(pg: ProcessGroup, words: str, tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(InvalidUsageError, match=words):
            pg.all_reduce(tensor)
        return tensor.sum()

    fakes = []
    for _ in range(2):  # tensors of a mode have state that threads share
        with FakeTensorMode():
            fakes.append(torch.ones(3))

    def body(pg: ProcessGroup) -> None:
        fake = fakes[pg.rank()]
        refused(pg, "tensor is a FakeTensor", fake)
        with pytest.raises(InvalidUsageError, match=r"obj\[0\] cannot travel safely: type FakeTensor"):
            pg.all_gather_object([fake])
        transforms: tuple[Any, ...] = (torch.func.grad, torch.func.functionalize)
        for transform in transforms:
            transform(partial(refused, pg, "only inside a transform"))(torch.ones(3))
        reduced = torch.ones(1)
        pg.all_reduce(reduced)
        assert reduced.item() == 2

    run_ranks(2, body, tenant)
