"""Folding tensors: left to right, half precision in float32, rounded once.

combine = bind_fold(reduction, dtype, world_size)     # once a plan
combine(dst, [a, b, c])                               # dst = (a + b) + c
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dist2.ops import Reduction

Fold = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
"""Folds contiguous flat tensors of one length into ``dst``, which may be any of them."""


def check_supported(reduction: Reduction, dtype: torch.dtype) -> None:
    """Raise `InvalidUsageError` where the reduction has no meaning for the dtype."""
    raise NotImplementedError


def is_exact(reduction: Reduction, dtype: torch.dtype) -> bool:
    """Return whether the result is independent of the order of folding."""
    raise NotImplementedError


def prepare(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return the contribution to fold: the tensor, or for `PREMUL_SUM` a multiplied copy."""
    raise NotImplementedError


def bind_fold(reduction: Reduction, dtype: torch.dtype, world_size: int, final: bool = True) -> Fold:
    """Return what folds tensors of this dtype (as `Fold.final` of schedules says).

    ``world_size`` is what a final `AVG` divides by. `PREMUL_SUM` folds prepared contributions.
    """
    raise NotImplementedError


def fold(dst: torch.Tensor, srcs: Sequence[torch.Tensor], reduction: Reduction, final: bool = True) -> None:
    """Fold the contributions of ``len(srcs)`` ranks into ``dst``."""
    bind_fold(reduction, dst.dtype, len(srcs), final)(dst, srcs)
