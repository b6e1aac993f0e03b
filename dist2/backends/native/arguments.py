"""Arguments of native calls, and the shapes of what they move."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from dist2.backends.base import Tensors
from dist2.clock import remaining_s
from dist2.operation import Operation

_SHORTEST = timedelta(milliseconds=1)
"""Libraries count milliseconds, and take zero for forever."""


def left(operation: Operation) -> timedelta:
    """Return what is left of an operation's time."""
    return max(timedelta(seconds=remaining_s(operation.deadline_ns)), _SHORTEST)


def options_of(kind: type[Any], operation: Operation) -> Any:
    """Return c10d options of a kind, with the operation's root and what is left of its time."""
    options = kind()
    options.timeout = left(operation)
    if operation.signature.root is not None:
        options.rootRank = operation.signature.root
    return options


def nbytes(tensors: Tensors) -> int:
    """Return the size of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def row_bytes(tensor: torch.Tensor, splits: Sequence[int] | None, world_size: int) -> list[int]:
    """Return how many bytes of a tensor's rows belong to each rank."""
    if not splits:
        return [nbytes([tensor]) // world_size] * world_size
    row = nbytes([tensor]) // max(1, sum(splits))
    return [count * row for count in splits]


def by_dtype(tensors: Tensors) -> list[list[int]]:
    """Return the indices of a list, those of one dtype together, in the same order on every rank."""
    alike: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault(tensor.dtype, []).append(index)
    return list(alike.values())


def spread(flat: torch.Tensor, tensors: Tensors) -> None:
    """Copy the elements of a flat tensor to tensors, one after the other."""
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        tensor.detach().copy_(flat[start:end].view(tensor.shape))
        start = end
