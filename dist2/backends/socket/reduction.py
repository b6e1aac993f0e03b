# cython: annotation_typing=False
"""Folding tensors: left to right, half precision in float32, rounded once.

    combine = bind_fold(reduction, dtype, world_size)     # once a plan
    combine(dst, [a, b, c])                               # dst = (a + b) + c

torch has no arithmetic on unsigned integers of 16 bits and more on the CPU. In two's complement their sums
and products have the bits of the signed ones; comparisons flip the sign bit for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from dist2.errors import InvalidUsageError
from dist2.operation.engine import FOLD_NAMES
from dist2.operation.kinds import ReduceKind, Reduction

Fold = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
"""Folds contiguous flat tensors of one length into ``dst``, which may be any of them, but not part of one."""

BLOCK_BYTES = 512 * 1024
"""Folds go through memory in blocks of this size, so that the accumulator stays in the
second-level cache: 4 float32 contributions of 16 MiB took 4.0 ms instead of 4.5 with one thread, 2.2 instead
of 3.6 with two. Smaller blocks cost more in calls than they save."""

_Combine = Callable[..., object]  # left, right, out=
_Finish = Callable[[torch.Tensor], object]

_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32, torch.float64}
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SIGNED_OF = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED_OF})

_BITWISE = frozenset({ReduceKind.BAND, ReduceKind.BOR, ReduceKind.BXOR})
_ORDERING = frozenset({ReduceKind.MIN, ReduceKind.MAX})
_ADDING = frozenset({ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PREMUL_SUM})


_COMBINE: dict[ReduceKind, _Combine] = {
    ReduceKind.SUM: torch.add,
    ReduceKind.AVG: torch.add,
    ReduceKind.PREMUL_SUM: torch.add,
    ReduceKind.PRODUCT: torch.mul,
    ReduceKind.MIN: torch.minimum,
    ReduceKind.MAX: torch.maximum,
    ReduceKind.BAND: torch.bitwise_and,
    ReduceKind.BOR: torch.bitwise_or,
    ReduceKind.BXOR: torch.bitwise_xor,
}
# On truth values a sum is "any" and a product "all"; torch computes them so, but not with bit operations.
_COMBINE_BOOL = _COMBINE | {
    ReduceKind.SUM: torch.bitwise_or,
    ReduceKind.PRODUCT: torch.bitwise_and,
    ReduceKind.MIN: torch.bitwise_and,
    ReduceKind.MAX: torch.bitwise_or,
}


def check_supported(reduction: Reduction, dtype: torch.dtype, op: str = "the group") -> None:
    """Check that a reduction has a meaning for a dtype.

    Args:
        reduction: The reduction.
        dtype: Of the tensors.
        op: Name of the operation, for the error.

    Raises:
        InvalidUsageError: It has none; the message names both.
    """
    kind = reduction.kind
    if dtype in _FLOATS:
        fits = kind not in _BITWISE
    elif dtype in _COMPLEX:
        fits = kind in _ADDING or (kind is ReduceKind.PRODUCT and dtype is not torch.complex32)
    elif dtype in _INTEGERS:
        fits = True
    else:
        fits = dtype is torch.bool and kind not in (ReduceKind.AVG, ReduceKind.PREMUL_SUM)
    if not fits:
        raise InvalidUsageError(f"{op} does not support {dtype} with op={kind.value} on CPU tensors")
    if kind is ReduceKind.PREMUL_SUM:
        _check_factor(reduction.factor, dtype)


def _check_factor(factor: float | None, dtype: torch.dtype) -> None:
    if dtype not in _INTEGERS:
        if factor is None:
            raise InvalidUsageError(f"op premul_sum needs a factor for {dtype}, got None")
        return
    limits = torch.iinfo(dtype)
    # Compared as integers: the largest int64 is no float.
    if factor is None or not float(factor).is_integer() or not limits.min <= int(factor) <= limits.max:
        raise InvalidUsageError(
            f"op premul_sum needs a whole factor of {limits.min} to {limits.max} for {dtype}, got {factor!r}"
        )


def is_exact(reduction: Reduction, dtype: torch.dtype) -> bool:
    """Return whether the result is independent of the order of folding.

    Signed zeros and payloads of NaN excepted: `MIN` of 0.0 and -0.0 may be either.
    """
    if dtype in _FLOATS or dtype in _COMPLEX:
        return reduction.kind in _ORDERING
    return True


def prepare(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return the contribution to fold: the tensor itself, or for `PREMUL_SUM` a multiplied copy."""
    if reduction.kind is not ReduceKind.PREMUL_SUM:
        return tensor
    factor = reduction.factor
    assert factor is not None  # check_supported has seen to it
    return torch.mul(tensor.detach(), int(factor) if tensor.dtype in _INTEGERS else factor)


def bind_fold(reduction: Reduction, dtype: torch.dtype, world_size: int, final: bool = True) -> Fold:
    """Return the function that folds tensors of one dtype.

    Args:
        reduction: `PREMUL_SUM` folds contributions that `prepare` has multiplied.
        dtype: Of all tensors. Complex sums are sums of their real parts and of their imaginary ones.
        world_size: Divisor of a final average; integers truncate.
        final: Whether the results are complete (`schedule.Fold.final`).

    Raises:
        InvalidUsageError: The reduction has no meaning for the dtype.
    """
    check_supported(reduction, dtype)
    kind = reduction.kind
    is_average = kind is ReduceKind.AVG and final and world_size > 1
    if dtype in _SIGNED_OF:
        return _bind_unsigned(kind, _SIGNED_OF[dtype], world_size if is_average else 1)
    if dtype in _COMPLEX and kind in _ADDING:
        return _viewed_as(_COMPLEX[dtype], bind_fold(reduction, _COMPLEX[dtype], world_size, final))
    finish = _division(dtype, world_size) if is_average else None
    combine = (_COMBINE_BOOL if dtype is torch.bool else _COMBINE)[kind]
    is_wide = dtype in _HALVES and kind not in _ORDERING
    return _in_blocks(_wide(combine, finish) if is_wide else _direct(combine, finish))


def fold(dst: torch.Tensor, srcs: Sequence[torch.Tensor], reduction: Reduction, final: bool = True) -> None:
    """Fold the contributions of ``len(srcs)`` ranks into ``dst``; see `bind_fold`."""
    bind_fold(reduction, dst.dtype, len(srcs), final)(dst, srcs)


def _division(dtype: torch.dtype, divisor: int) -> _Finish:
    if dtype in _INTEGERS and divisor <= torch.iinfo(dtype).max:
        return lambda tensor: torch.div(tensor, divisor, rounding_mode="trunc", out=tensor)
    if dtype in _INTEGERS:  # more ranks than an int8 can count
        return lambda tensor: tensor.copy_(tensor.int().div_(divisor, rounding_mode="trunc"))
    return lambda tensor: tensor.div_(divisor)


def _direct(combine: _Combine, finish: _Finish | None) -> Fold:
    """Fold in the dtype of the tensors, without temporaries unless ``dst`` is a later source."""

    def fold_block(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        result = torch.empty_like(dst) if _is_overwritten_early(dst, srcs) else dst
        if len(srcs) == 1:
            result.copy_(srcs[0])
        else:
            combine(srcs[0], srcs[1], out=result)
        for src in srcs[2:]:
            combine(result, src, out=result)
        if finish is not None:
            finish(result)
        if result is not dst:
            dst.copy_(result)

    return fold_block


def _wide(combine: _Combine, finish: _Finish | None) -> Fold:
    """Fold half precision in float32 and round once."""

    def fold_block(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        if len(srcs) == 2 and finish is None:
            combine(srcs[0], srcs[1], out=dst)  # torch computes one operation in float32 and rounds it once
            return
        wide = srcs[0].float()
        for src in srcs[1:]:
            combine(wide, src, out=wide)
        if finish is not None:
            finish(wide)
        dst.copy_(wide)

    return fold_block


def _bind_unsigned(kind: ReduceKind, signed: torch.dtype, divisor: int) -> Fold:
    """Fold unsigned integers of 16 bits and more through their signed twins."""
    combine = _COMBINE[kind]
    if kind not in _ORDERING:
        finish = _unsigned_division(signed, divisor) if divisor > 1 else None
        return _viewed_as(signed, _in_blocks(_direct(combine, finish)))
    sign = torch.iinfo(signed).min

    def fold_block(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        result = torch.bitwise_xor(srcs[0], sign)
        flipped = torch.empty_like(result)
        for src in srcs[1:]:
            torch.bitwise_xor(src, sign, out=flipped)
            combine(result, flipped, out=result)
        torch.bitwise_xor(result, sign, out=dst)

    return _viewed_as(signed, _in_blocks(fold_block))


def _unsigned_division(signed: torch.dtype, divisor: int) -> _Finish:
    """Divide unsigned numbers that are held in signed ones, as in Hacker's Delight, section 9-3."""
    positive = torch.iinfo(signed).max
    sign = torch.iinfo(signed).min

    def divide(tensor: torch.Tensor) -> None:
        halved = (tensor >> 1).bitwise_and_(positive)
        quotient = halved.div_(divisor, rounding_mode="trunc").mul_(2)
        rest = tensor - quotient * divisor
        # An unsigned comparison is the signed one with both sign bits flipped.
        quotient += (rest ^ sign) >= (divisor ^ sign)
        tensor.copy_(quotient)

    return divide


def _viewed_as(dtype: torch.dtype, inner: Fold) -> Fold:
    def fold_views(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        inner(dst.view(dtype), [src.view(dtype) for src in srcs])

    return fold_views


def _is_overwritten_early(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> bool:
    address = dst.data_ptr()
    return any(src.data_ptr() == address for src in srcs[2:])


def _in_blocks(fold_block: Fold) -> Fold:
    def fold_all(dst: torch.Tensor, srcs: Sequence[torch.Tensor]) -> None:
        numel, block = dst.numel(), BLOCK_BYTES // dst.element_size()
        if numel <= block:
            fold_block(dst, srcs)
            return
        for start in range(0, numel, block):
            stop = start + block
            fold_block(dst[start:stop], [src[start:stop] for src in srcs])

    return fold_all


_ORDERED = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
}
_SUMS = _ORDERED | {
    torch.complex64: "float32",
    torch.complex128: "float64",
    torch.uint32: "int32",
    torch.uint64: "int64",
}
"""Dtypes of which the core finds the smallest and the largest, those that it sums, and how."""


@attrs.frozen
class Folding:
    """How a plan folds.

    Attributes:
        function: Folds tensors.
        native: Number of the equivalent fold of the core; None without one.
        divisor: Divisor of the final sum; 1: none.
    """

    function: Fold
    native: int | None = None
    divisor: float = 1.0

    @classmethod
    def of(cls, reduction: Reduction, dtype: torch.dtype, world_size: int, final: bool = True) -> Folding:
        """Return how contributions of one dtype are folded; see `bind_fold`."""
        function = bind_fold(reduction, dtype, world_size, final)
        if reduction.kind in _ORDERING and dtype in _ORDERED:
            return cls(function, FOLD_NAMES[f"{reduction.kind.value}_{_ORDERED[dtype]}"])
        if reduction.kind not in _ADDING or dtype not in _SUMS:
            return cls(function)
        if reduction.kind is ReduceKind.AVG and final:
            return cls(function, FOLD_NAMES.get(f"average_{_SUMS[dtype]}"), float(world_size))
        return cls(function, FOLD_NAMES[f"sum_{_SUMS[dtype]}"])
