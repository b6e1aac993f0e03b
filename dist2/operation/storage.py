"""Tensors that stand for others and have no memory of their own: the results of functional collectives, say.

Whatever reads a tensor by its address must not be given one. Such tensors are found by that they have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dist2.operation.execution import Execute, Helped
    from dist2.operation.signature import Operation

Tensors = Sequence[torch.Tensor]


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor says that it is on the CPU and has elements, but no address."""
    try:
        return tensor.is_cpu and tensor.data_ptr() == 0 and tensor.numel() > 0
    except RuntimeError:  # it has no storage at all
        return True


def is_awaited(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the result of a functional collective, an `AsyncCollectiveTensor`."""
    return hasattr(type(tensor), "trigger_wait")


def awaited(tensors: Tensors) -> Tensors:
    """Return tensors with what they stand for in place of those that are on their way, once it came."""
    if not any(map(is_awaited, tensors)):
        return tensors
    # Those that are awaited are of torch's AsyncCollectiveTensor, which has the method.
    return [each.trigger_wait() if is_awaited(each) else each for each in tensors]  # type: ignore[attr-defined]  # only such tensors have it


def always_on(execute: Execute, inputs: Tensors, outputs: Tensors) -> Execute:
    """Return what runs a call on these tensors, whatever it is called with."""

    def run(operation: Operation, _: Tensors, __: Tensors) -> Future[None] | Helped | None:
        return execute(operation, inputs, outputs)

    return run
