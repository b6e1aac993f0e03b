"""How NCCL does a reduction of a dtype: in the dtype itself, in a wider one, or on another view of the
bits."""

from __future__ import annotations

import attrs
import torch

from dist2.errors import InvalidUsageError
from dist2.operation.kinds import ReduceKind, Reduction

UINT8, INT64 = 1, 4
"""NCCL's codes for tensors that move as bytes, and as words of 8 bytes."""

_CODES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {
    ReduceKind.SUM: 0,
    ReduceKind.PRODUCT: 1,
    ReduceKind.MAX: 2,
    ReduceKind.MIN: 3,
    ReduceKind.AVG: 4,
    ReduceKind.PREMUL_SUM: -1,  # made at run time, one for each factor
}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32}
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_LINEAR = (ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PREMUL_SUM)
"""Reductions of complex numbers that work on real and imaginary parts separately."""
_OF_BOOLEANS = {
    ReduceKind.SUM: ReduceKind.MAX,
    ReduceKind.MAX: ReduceKind.MAX,
    ReduceKind.BOR: ReduceKind.MAX,
    ReduceKind.PRODUCT: ReduceKind.MIN,
    ReduceKind.MIN: ReduceKind.MIN,
    ReduceKind.BAND: ReduceKind.MIN,
}
"""On bytes that are 0 or 1."""


@attrs.frozen
class Arithmetic:
    """One reduction of one dtype.

    Attributes:
        dtype: The dtype that NCCL sees.
        converts: Tensors are converted to it; else they are viewed as it.
        code: NCCL's code of it.
        parts: How many elements of it one element of the tensors is: two for a complex number.
        op: NCCL's code of the reduction; -1 for one that is made of `factor`.
        factor: One element of the dtype, as bytes, that each contribution is multiplied with first.
    """

    dtype: torch.dtype
    converts: bool
    code: int
    parts: int
    op: int
    factor: bytes = b""


def arithmetic_of(dtype: torch.dtype, reduction: Reduction, op: str) -> Arithmetic:
    """Return how NCCL does a reduction.

    Args:
        dtype: The tensors' dtype.
        reduction: The reduction that the caller asked for.
        op: The operation, for the error.

    Raises:
        InvalidUsageError: It cannot.
    """
    kind = _OF_BOOLEANS.get(reduction.kind) if dtype is torch.bool else reduction.kind
    if dtype.is_complex and kind not in _LINEAR:
        kind = None
    if kind is ReduceKind.PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
        kind = None
    carried = torch.uint8 if dtype is torch.bool else _PARTS.get(dtype) or _WIDER.get(dtype) or dtype
    if kind not in _OPS or carried not in _CODES:
        raise InvalidUsageError(
            f"{op} with op={reduction} is not possible on {dtype} with backend 'nccl', which has SUM, "
            f"PRODUCT, MIN, MAX, AVG and PREMUL_SUM of numbers; 'socket' on CPU tensors has the others"
        )
    factor = b""
    if reduction.factor is not None:
        one = torch.tensor([reduction.factor], dtype=carried, device="cpu")
        factor = bytes(one.view(torch.uint8).tolist())
    return Arithmetic(
        carried, dtype in _WIDER, _CODES[carried], 2 if dtype.is_complex else 1, _OPS[kind], factor
    )


def moved(nbytes: int) -> tuple[int, int]:
    """Return as how many elements of which code some bytes are moved: few, as cupy counts in 32 bits."""
    return (nbytes // 8, INT64) if nbytes % 8 == 0 else (nbytes, UINT8)
