"""What an operation that failed was to write is marked: nothing in it shall look like a result.

Tensors of floating and complex dtypes are filled with NaN, which also shows in whatever is computed from
them. Integers have no such value, so they get the one that is least often a result and that breaks whatever
takes it for an index or a count: the lowest where it is negative, else the highest. A boolean can only look
like a result: False everywhere is at least no half of one, and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.operation.kinds import OpKind
from dist2.operation.signature import Signature

_NAN = float("nan")
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_NATURALS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EIGHTS = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)

_MARKS: dict[torch.dtype, complex] = {
    torch.bool: False,
    **{dtype: torch.iinfo(dtype).min for dtype in _INTEGERS},
    **{dtype: torch.iinfo(dtype).max for dtype in _NATURALS},
    **dict.fromkeys((*_FLOATS, *_EIGHTS), _NAN),
    **dict.fromkeys((torch.complex32, torch.complex64, torch.complex128), complex(_NAN, _NAN)),
}

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
    """Fill what a failed operation was to write with the mark of its dtype: see the module.

    The root's tensor of a `broadcast` is only read, and keeps its values. So does an input that lies in an
    output, as the own part of an `all_gather_single` in place. The caller sees to it that nobody else
    touches the tensors any more.

    Args:
        signature: The operation's signature.
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
        mark(target)
    for source, values in kept:
        source.copy_(values)


def mark(tensor: torch.Tensor) -> None:
    """Fill a tensor with what says that it holds no result."""
    value = _MARKS.get(tensor.dtype)
    if value is not None:
        tensor.detach().fill_(value)
    else:  # packed or opaque: there are only bits
        words = torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16
        tensor.detach().view(words).fill_(-1 if words.is_signed else 255)


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor's memory begins inside another's."""
    return 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes
