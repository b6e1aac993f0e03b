"""Contiguous copies of tensors that are not: made before an operation, written back after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dist2.operation import Operation

Tensors = Sequence[torch.Tensor]
Program = Callable[[Operation, Tensors, Tensors], None]
"""Runs one operation on contiguous tensors, to its end."""


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
    """Run a program on contiguous copies; a tensor that is input and output has one for both."""
    copies: dict[int, torch.Tensor] = {}
    read = [_contiguous(tensor, copies) for tensor in inputs]
    written = [_contiguous(tensor, copies) for tensor in outputs]
    program(operation, read, written)
    for tensor, copy in zip(outputs, written, strict=True):
        if copy is not tensor:
            tensor.detach().copy_(copy)


def _contiguous(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    if is_plain(tensor):
        return tensor
    return copies.setdefault(id(tensor), plain(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values one after the other: itself if they are."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()
