"""The tensors of an operation that failed."""

from __future__ import annotations

import pytest
import torch

import dist2
from dist2 import GroupAbortedError
from dist2.operation.failures import poison_outputs
from dist2.operation.kinds import OpKind
from dist2.operation.signature import GroupInfo, Signature

FLOATING = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
UINT4 = torch.uint4  # type: ignore[attr-defined]  # not in torch's stubs


def signature(kind: OpKind, root: int | None = None, rank: int = 0) -> Signature:
    return Signature(kind, GroupInfo("uid", "group", "", "socket", rank, (0, 1)), root=root)


@pytest.mark.parametrize("dtype", [*FLOATING, torch.complex64, torch.complex128])
def test_outputs_are_not_a_number(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    poison_outputs(signature(OpKind.ALL_REDUCE), [tensor], [tensor])
    assert torch.isnan(tensor if dtype.is_complex else tensor.double()).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_their_lowest(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    poison_outputs(signature(OpKind.ALL_REDUCE), [tensor], [tensor])
    assert tensor.tolist() == [torch.iinfo(dtype).min] * 5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_integers_without_a_sign_are_their_highest(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    poison_outputs(signature(OpKind.ALL_REDUCE), [tensor], [tensor])
    assert tensor.tolist() == [torch.iinfo(dtype).max] * 5


def test_booleans_are_all_the_same() -> None:
    tensor = torch.tensor([True, False, True])
    poison_outputs(signature(OpKind.ALL_REDUCE), [tensor], [tensor])
    assert tensor.tolist() == [False] * 3


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, UINT4, torch.bits8, torch.bits16])
def test_of_what_is_only_bits_all_are_set(dtype: torch.dtype) -> None:
    raw = torch.zeros(8, dtype=torch.uint8)
    poison_outputs(signature(OpKind.BROADCAST, root=1), [], [raw.view(dtype)])
    assert raw.tolist() == [255] * 8


def test_strides_gradients_and_empty_tensors() -> None:
    base = torch.ones(6)
    parameter = torch.nn.Parameter(torch.ones(2))
    poison_outputs(signature(OpKind.ALL_GATHER), [torch.ones(2)], [base[::2], parameter, torch.empty(0)])
    assert torch.isnan(base).tolist() == [True, False] * 3
    assert torch.isnan(parameter).all()


def test_the_root_of_a_broadcast_keeps_its_tensor() -> None:
    tensor = torch.ones(3)
    poison_outputs(signature(OpKind.BROADCAST, root=1, rank=1), [tensor], [tensor])
    assert torch.equal(tensor, torch.ones(3))
    poison_outputs(signature(OpKind.BROADCAST, root=1, rank=0), [tensor], [tensor])
    assert torch.isnan(tensor).all()


def test_the_own_part_of_a_gathered_tensor_is_kept() -> None:
    whole = torch.ones(6)
    poison_outputs(signature(OpKind.ALL_GATHER_SINGLE), [whole[2:4]], [whole])
    assert torch.isnan(whole).tolist() == [True, True, False, False, True, True]


def test_a_result_inside_its_input_is_not() -> None:
    whole = torch.ones(6)
    poison_outputs(signature(OpKind.REDUCE_SCATTER_SINGLE), [whole], [whole[:3]])
    assert torch.isnan(whole).tolist() == [True, True, True, False, False, False]


def test_an_operation_that_runs_out_of_memory_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as pg:

        def run(operation: object, inputs: object, outputs: object) -> None:
            raise MemoryError

        for name in ("plan", "plan_plain"):
            monkeypatch.setattr(pg.backend, name, lambda signature: run)
        tensor = torch.ones(2)
        with pytest.raises(MemoryError):
            pg.all_reduce(tensor)
        assert torch.isnan(tensor).all()
        with pytest.raises(GroupAbortedError, match="interrupted by MemoryError"):
            pg.all_reduce(torch.ones(2))
