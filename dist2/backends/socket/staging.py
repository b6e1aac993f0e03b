"""Stand-ins for tensors that are not contiguous: gathered before an operation, written back after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dist2.operation import Operation

Tensors = Sequence[torch.Tensor]
Program = Callable[[Operation, Tensors, Tensors], None]
"""Runs one operation on contiguous tensors, to its end."""


def staged(program: Program) -> Program:
    """Return a program that takes tensors of any strides."""

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        for tensor in inputs:
            if not tensor.is_contiguous():
                break
        else:
            for tensor in outputs:
                if not tensor.is_contiguous():
                    break
            else:
                program(operation, inputs, outputs)
                return
        run_staged(program, operation, inputs, outputs)

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
    if tensor.is_contiguous():
        return tensor
    return copies.setdefault(id(tensor), tensor.detach().contiguous())
