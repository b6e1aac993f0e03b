# cython: annotation_typing=False
"""The memory of tensors: flat views, and tensors without storage.

Results of functional collectives, DTensors, and other wrapper subclasses have no storage. Code that
dereferences data_ptr() must not receive them; they are detected by data_ptr() == 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dist2.operation.execution import Execute, Helped
    from dist2.operation.record import Operation

Tensors = Sequence[torch.Tensor]


def has_no_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor says that it is on the CPU and has elements, but no address."""
    try:
        return tensor.is_cpu and tensor.data_ptr() == 0 and tensor.numel() > 0
    except RuntimeError:  # it has no storage at all
        return True


def exceeds_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements beyond the end of its storage, which was made smaller since."""
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # it has no storage at all
        return False
    return tensor.numel() > 0 and (tensor.storage_offset() + reach(tensor)) * tensor.itemsize > nbytes


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements without memory, for either reason."""
    return has_no_storage(tensor) or exceeds_storage(tensor)


def reach(tensor: torch.Tensor) -> int:
    """Return how many elements lie from the first of a tensor to its last, those between them included."""
    if tensor.is_contiguous():
        return tensor.numel()
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum([(extent - 1) * stride for extent, stride in strides])


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as one dimension of stride 1 on the same memory.

    ``view(-1)`` keeps the stride of a tensor with one element, such as ``matrix[:1, 0]``, and torch then
    refuses to view it as a dtype of another size.
    """
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


def is_async_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the result of a functional collective, an `AsyncCollectiveTensor`."""
    return hasattr(type(tensor), "trigger_wait")


def wait_async_tensors(tensors: Tensors) -> Tensors:
    """Wait for each `AsyncCollectiveTensor`, and return the tensors with the results in their place."""
    if not any(map(is_async_tensor, tensors)):
        return tensors
    # The type of those is torch's AsyncCollectiveTensor, which has the method.
    return [each.trigger_wait() if is_async_tensor(each) else each for each in tensors]  # type: ignore[attr-defined]  # only such tensors have it


def always_on(execute: Execute, inputs: Tensors, outputs: Tensors) -> Execute:
    """Return a callable that ignores its arguments and runs a call on these tensors."""

    def run(operation: Operation, _: Tensors, __: Tensors) -> Future[None] | Helped | None:
        return execute(operation, inputs, outputs)

    return run
