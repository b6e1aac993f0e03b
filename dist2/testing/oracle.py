"""The results of collectives, computed from all ranks' inputs in one process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch

from dist2.operation.kinds import ReduceKind, Reduction


def reduced(tensors: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """Combine in rank order, half precision in float32, rounding once: the bitwise result of `socket`."""
    dtype = tensors[0].dtype
    wide = [_widened(tensor) for tensor in tensors]
    if reduction.kind is ReduceKind.PREMUL_SUM:
        assert reduction.factor is not None
        wide = [_widened((tensor * reduction.factor).to(dtype)) for tensor in tensors]
    result = wide[0].clone()
    for tensor in wide[1:]:
        result = _combine(result, tensor, reduction.kind)
    if reduction.kind is ReduceKind.AVG:
        count = len(tensors)
        if dtype.is_complex:
            result = torch.view_as_complex(torch.view_as_real(result) / count)
        elif dtype.is_floating_point:
            result = result / count
        else:
            result = torch.div(result, count, rounding_mode="trunc")
    return _narrowed(result, dtype)


def _combine(left: torch.Tensor, right: torch.Tensor, kind: ReduceKind) -> torch.Tensor:
    match kind:
        case ReduceKind.SUM | ReduceKind.AVG | ReduceKind.PREMUL_SUM:
            return left + right
        case ReduceKind.PRODUCT:
            return left * right
        case ReduceKind.MIN:
            return torch.minimum(left, right)
        case ReduceKind.MAX:
            return torch.maximum(left, right)
        case ReduceKind.BAND:
            return left & right
        case ReduceKind.BOR:
            return left | right
        case ReduceKind.BXOR:
            return left ^ right
    raise AssertionError(kind)


_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.float16: torch.float32}
_WIDE[torch.bfloat16] = torch.float32


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.uint16, torch.uint32):
        bits = 8 * dtype.itemsize
        return (tensor & ((1 << bits) - 1)).to(dtype)
    return tensor.to(dtype)


def example(shape: Sequence[int], dtype: torch.dtype, rank: int, salt: int = 0) -> torch.Tensor:
    """Return values that differ by rank and element, small enough for products and 8-bit sums."""
    with _MAKING:  # ranks that are threads want the same at once
        made = _made(tuple(shape), dtype, rank, salt)
    return made.clone()


_MAKING = threading.Lock()


@functools.lru_cache(maxsize=32)  # of a few MB each; each rank makes those of all
def _made(shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.4
    if dtype.is_complex:
        parts = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    low = 0 if not dtype.is_signed else -4
    return torch.randint(low, 5, shape, generator=generator).to(dtype)
