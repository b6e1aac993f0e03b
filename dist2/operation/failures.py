"""Failed operations: the place and the name in their errors, and outputs that do not look like a result.

Outputs are *poisoned*: those of floating and complex dtypes are filled with NaN, which propagates to values
computed from them. Integers have no such value. They get the value that is least often a result, and fails as
an index or a count: the lowest of a signed dtype, the highest of an unsigned one. Every boolean looks like a
result; False everywhere is at least not a partial one, and is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

import torch

from dist2.errors import Dist2Error, GroupRevokedError, OperationTimeoutError, PeerLostError
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
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
"""Operations that may be called in place: an input may lie in the output at its own place in the result."""

Tensors = Sequence[torch.Tensor]


def own(error: Dist2Error) -> Dist2Error:
    """Return a copy for one operation: all that run when a group breaks raise the same error."""
    copy = error.again(str(error))
    copy.__cause__ = error.__cause__
    return copy


def locate(error: Dist2Error, operation: Operation) -> None:
    """Fill in the place of a failed operation."""
    signature = operation.signature
    group = signature.group
    error.locate(group.name, signature.kind.value, operation.seq, group.rank, group.global_ranks)


def name_operation(error: Dist2Error, operation: Operation) -> None:
    """Name the failed operation in the message."""
    if isinstance(error, (OperationTimeoutError, PeerLostError, GroupRevokedError)):
        error.prefix(f"{operation.describe()} in group {operation.signature.group.name!r}")
        if isinstance(error, OperationTimeoutError) and error.timeout_s is None:
            error.timeout_s = operation.timeout_s
            error.elapsed_s = (monotonic_ns() - operation.created_ns) / 1e9
            # torch's words: programs that ran on torch search for them
            words = str(error).removesuffix(" (Timed out)")
            error.args = (
                f"{words}. Timed out after {error.elapsed_s:.3g} s, limit {operation.timeout_s:.3g} s",
            )


def poison_outputs(signature: Signature, inputs: Tensors, outputs: Tensors) -> None:
    """Fill the outputs of a failed operation with the poison of their dtype.

    The root's tensor of a `broadcast` is only read, and keeps its values. So does an input that lies in an
    output, as the own part of an `all_gather_single` in place. The caller guarantees that nothing else
    accesses the tensors.

    Args:
        signature: The operation's signature.
        inputs: The tensors that it read.
        outputs: The tensors that it was to write.
    """
    if signature.kind is OpKind.BROADCAST and signature.root == signature.group.rank:
        return
    kept = []
    if signature.kind in _IN_PLACE_INPUTS:
        within = [source for source in inputs if any(_lies_in(source, target) for target in outputs)]
        kept = [(source.detach(), source.detach().clone()) for source in within]
    for target in outputs:
        poison(target)
    for source, values in kept:
        source.copy_(values)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with the poison of its dtype."""
    value = _MARKS.get(tensor.dtype)
    if value is not None:
        tensor.detach().fill_(value)
    else:  # packed or opaque: there are only bits
        words = torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16
        tensor.detach().view(words).fill_(-1 if words.is_signed else 255)


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor's memory begins inside another's."""
    return 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes
