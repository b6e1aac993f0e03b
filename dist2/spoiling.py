"""What an operation that failed was to write is marked: nothing in it shall look like a result.

Tensors of floating and complex dtypes are filled with NaN, which also shows in whatever is computed from
them. Integers and booleans have no value that is no result: they are left as they are, undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.operation import Signature
from dist2.ops import OpKind

_NAN = float("nan")

_IN_PLACE_INPUTS = frozenset(
    {
        OpKind.ALL_GATHER,
        OpKind.ALL_GATHER_V,
        OpKind.ALL_GATHER_SINGLE,
        OpKind.ALL_GATHER_SINGLE_COALESCED,
        OpKind.GATHER,
        OpKind.SCATTER,
    }
)
"""Operations whose input may lie in the output, at the place that it has in the result anyway."""

Tensors = Sequence[torch.Tensor]


def spoil(signature: Signature, inputs: Tensors, outputs: Tensors) -> None:
    """Fill what a failed operation was to write with NaN, where the dtype has it.

    The root's tensor of a `broadcast` is only read, and keeps its values. So does an input that lies in an
    output, as the own part of an `all_gather_single` in place. The caller sees to it that nobody else
    touches the tensors any more.

    Args:
        signature: Of the operation.
        inputs: What it read.
        outputs: What it was to write.
    """
    if signature.kind is OpKind.BROADCAST and signature.root == signature.group.rank:
        return
    kept = []
    if signature.kind in _IN_PLACE_INPUTS:
        within = [source for source in inputs if any(_lies_in(source, target) for target in outputs)]
        kept = [(source.detach(), source.detach().clone()) for source in within]
    for target in outputs:
        if target.dtype.is_floating_point:
            target.detach().fill_(_NAN)
        elif target.dtype.is_complex:
            target.detach().fill_(complex(_NAN, _NAN))
    for source, values in kept:
        source.copy_(values)


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor's memory begins inside another's."""
    return 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes
