"""Calls whose outputs share memory with their inputs: detection, and copies where a call needs them.

A backend writes outputs while inputs are still read, by this rank and by others. So an input may only share
memory with an output where its elements are in the result anyway: the rank's own part of a gather, say. Any
other input that an output covers is read from a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import NamedTuple

import torch

from dist2.errors import InvalidUsageError
from dist2.operation.execution import Execute, Helped
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.operation.storage import reach

Tensors = Sequence[torch.Tensor]

_GATHERING = (OpKind.ALL_GATHER, OpKind.ALL_GATHER_V, OpKind.GATHER)
_SCATTERING = (OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_V, OpKind.SCATTER)
_GATHERING_SINGLE = (OpKind.ALL_GATHER_SINGLE, OpKind.ALL_GATHER_SINGLE_COALESCED)
_SCATTERING_SINGLE = (OpKind.REDUCE_SCATTER_SINGLE, OpKind.REDUCE_SCATTER_SINGLE_COALESCED)


class Overlap(NamedTuple):
    """An input and an output that share memory.

    Attributes:
        input: Which of the inputs.
        output: Which of the outputs.
        offset: How many bytes behind the beginning of the output the input begins.
    """

    input: int
    output: int
    offset: int


def overlaps(inputs: Tensors, outputs: Tensors) -> tuple[Overlap, ...]:
    """Return where inputs and outputs share memory; of strided tensors, all between their ends counts."""
    try:
        read, written = [_span(each) for each in inputs], [_span(each) for each in outputs]
    except RuntimeError:  # tensors without memory, as those that a compiler traces with
        return ()
    return tuple(
        [
            Overlap(i, o, source[0] - target[0])
            for i, source in enumerate(read)
            for o, target in enumerate(written)
            if source[0] < target[1] and target[0] < source[1]
        ]
    )


def shared_places(inputs: Tensors, outputs: Tensors) -> tuple[tuple[Overlap, ...], ...]:
    """Return where tensors share memory with outputs, as a part of a plan's key; mostly an empty tuple."""
    if outputs is inputs and len(inputs) == 1:
        return ()
    try:
        spans = sorted([_span(each) for each in (inputs if outputs is inputs else (*inputs, *outputs))])
    except RuntimeError:
        return ()
    reached = 0
    for start, end in spans:
        if start < reached and start < end:
            return (() if outputs is inputs else overlaps(inputs, outputs), collisions(outputs))
        reached = max(reached, end)
    return ()


def collisions(outputs: Tensors) -> tuple[Overlap, ...]:
    """Return where outputs share memory with one another."""
    return tuple([each for each in overlaps(outputs, outputs) if each.input < each.output])


def check_apart(tensors: Tensors, argument: str) -> None:
    """Check that no two tensors of a list that is written share memory; of strided ones that is not asked.

    Raises:
        InvalidUsageError: Two do, as in ``[torch.empty(4)] * world_size``.
    """
    try:
        spans = sorted((*_span(each), index) for index, each in enumerate(tensors) if each.is_contiguous())
    except RuntimeError:
        return
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise InvalidUsageError(
                f"{argument}[{min(one, other)}] and {argument}[{max(one, other)}] share memory, and each is "
                f"written to: pass tensors that do not overlap"
            )


def on_copies(execute: Execute, signature: Signature, inputs: Tensors, outputs: Tensors) -> Execute:
    """Return a function that runs a call on copies of the inputs that its outputs would overwrite.

    So does the root of a broadcast with a tensor whose elements are not in order: its backend may write what
    it sent to the tensor, whose elements may share memory.

    Args:
        execute: Runs calls whose outputs cover no input, except where it is in the result.
        signature: The call's signature.
        inputs: The inputs of a typical call.
        outputs: The outputs of that call.
    """
    if signature.kind is OpKind.BROADCAST and signature.root == signature.group.rank:
        return execute if inputs[0].is_contiguous() else _of_contiguous(execute)
    in_place = outputs is inputs and signature.kind is not OpKind.ALL_TO_ALL
    found = () if in_place else overlaps(inputs, outputs)
    overwritten = {each.input for each in found if not _stays(each, signature, inputs, outputs)}
    if not overwritten:
        return execute

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | Helped | None:
        kept = [each.detach().clone() if i in overwritten else each for i, each in enumerate(inputs)]
        return execute(operation, kept, outputs)

    return run


def _of_contiguous(execute: Execute) -> Execute:
    """Return a function that runs a call in place on a contiguous copy of its tensor."""

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | Helped | None:
        copies = [inputs[0].detach().contiguous()]
        return execute(operation, copies, copies)

    return run


def _stays(overlap: Overlap, signature: Signature, inputs: Tensors, outputs: Tensors) -> bool:
    """Whether an input, or the part made of it, already lies at its place in the output."""
    source, target = inputs[overlap.input], outputs[overlap.output]
    is_same = (source.shape, source.stride()) == (target.shape, target.stride())
    if not is_same and not (source.is_contiguous() and target.is_contiguous()):
        return False
    kind, rank, pair = signature.kind, signature.group.rank, (overlap.input, overlap.output)
    if kind in _GATHERING_SINGLE:
        return pair[0] == pair[1] and overlap.offset == rank * source.nbytes
    if kind in _SCATTERING_SINGLE:
        return pair[0] == pair[1] and overlap.offset == -rank * target.nbytes
    own = {
        **dict.fromkeys(_GATHERING, (0, rank)),
        **dict.fromkeys(_SCATTERING, (rank, 0)),
        OpKind.REDUCE: (0, 0),
    }
    return pair == own.get(kind) and overlap.offset == 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor and the one behind its last."""
    start = tensor.data_ptr()
    if start == 0 or not tensor.numel():  # on the meta device, or empty
        return start, start
    return start, start + reach(tensor) * tensor.itemsize
