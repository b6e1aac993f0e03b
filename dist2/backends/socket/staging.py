"""Contiguous copies of non-contiguous tensors: made before an operation, written back after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation

Tensors = Sequence[torch.Tensor]
Program = Callable[[Operation, Tensors, Tensors], None]
"""Runs one operation on contiguous tensors, to its end."""
Make = Callable[[torch.Tensor], torch.Tensor]


def staged(program: Program, dtype: torch.dtype) -> Program:
    """Return a program that takes tensors of any strides, and lazily conjugated or negated ones."""
    if dtype.is_complex:
        return partial(run_staged, program)

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        for tensors in (inputs,) if outputs is inputs else (inputs, outputs):
            for tensor in tensors:
                if not tensor.is_contiguous() or tensor.is_neg():
                    run_staged(program, operation, inputs, outputs)
                    return
        program(operation, inputs, outputs)

    return run


def run_staged(program: Program, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
    """Run a program on contiguous copies; a tensor that is input and output has one for both.

    A tensor that is only written is not copied in, and one that is only read is not copied back: in a
    broadcast, the tensors of all ranks but the root, and that of the root.
    """
    signature = operation.signature
    is_broadcast = signature.kind is OpKind.BROADCAST
    is_root = signature.root == signature.group.rank
    copies: dict[int, torch.Tensor] = {}
    read = _copied(inputs, copies, _room_for if is_broadcast and not is_root else plain)
    written = _copied(outputs, copies, _room_for)
    program(operation, read, written)
    if is_broadcast and is_root:
        return
    for tensor, copy in zip(outputs, written, strict=True):
        if copy is not tensor:
            tensor.detach().copy_(copy)


def _copied(tensors: Tensors, copies: dict[int, torch.Tensor], make: Make) -> Tensors:
    """Return tensors, or the copies of those that are not contiguous: made unless they are there."""
    found = []
    for tensor in tensors:
        copy = tensor if is_plain(tensor) else copies.get(id(tensor))
        if copy is None:
            copy = copies[id(tensor)] = make(tensor)
        found.append(copy)
    return found


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values one after the other: itself if they are."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()
