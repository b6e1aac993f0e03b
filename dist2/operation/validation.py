"""Argument checks: pure, run once per distinct call, before anything is sent.

Each raises `InvalidUsageError` with the argument's name and value. Whether tensors of one call fit
together is checked here; whether ranks agree is checked by the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.operation.storage import exceeds_storage, has_no_storage, is_async_tensor
from dist2.runtime.arguments import as_int, shown

Tensors = Sequence[torch.Tensor]


def _instead(given: object) -> str:
    """Return the tensor to pass in place of an object, for an error."""
    if isinstance(given, (int, float, str, list, tuple, dict)) or type(given).__module__ == "numpy":
        return "; use torch.tensor(...) for numbers, or a method for objects, such as broadcast_object"
    return ""


def check_tensor(tensor: object, argument: str, device_types: Sequence[str]) -> torch.Tensor:
    """Return a dense tensor on a device of the backend."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"{argument} must be a torch.Tensor, got {type(tensor).__name__}: "
            f"{shown(tensor)}{_instead(tensor)}"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise InvalidUsageError(
            f"{argument} must be a dense (strided) tensor, got layout {layout}, which dist2 does not support"
        )
    check_device(tensor, argument, device_types)
    if tensor.is_quantized:
        raise InvalidUsageError(
            f"{argument} is quantized, and its scale would not travel: "
            f"pass {argument}.int_repr(), or dequantize()"
        )
    if "meta" not in device_types:
        if has_no_storage(tensor):
            _check_stand_in(tensor, argument)
        elif exceeds_storage(tensor):
            raise InvalidUsageError(
                f"{argument} has shape {list(tensor.shape)}, strides {list(tensor.stride())}, offset "
                f"{tensor.storage_offset()} and {tensor.itemsize} bytes an element, but a storage of "
                f"{tensor.untyped_storage().nbytes()} bytes, which was made smaller since: "
                f"resize the storage, or pass a tensor that fits into it"
            )
    return tensor


def check_device(tensor: torch.Tensor, argument: str, device_types: Sequence[str]) -> None:
    """Check that a tensor is on a device of the backend."""
    if tensor.device.type not in device_types:
        remedy = (
            "give it memory with Module.to_empty or torch.empty_like, or use the backend 'fake'"
            if tensor.is_meta
            else "move it there"
        )
        raise InvalidUsageError(
            f"{argument} is on device {tensor.device}; this group's backend takes "
            f"{', '.join(device_types)}: {remedy}"
        )


def _check_stand_in(tensor: torch.Tensor, argument: str) -> None:
    """Check that a tensor without storage is the result of a functional collective: those are waited for."""
    if is_async_tensor(tensor):
        return
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        raise InvalidUsageError(
            f"{argument} has shape {list(tensor.shape)} but no memory: "
            f"its storage was freed (as FSDP does with "
            f"parameters between uses), or it exists only inside a transform, such as torch.func's or a trace"
        )
    raise InvalidUsageError(
        f"{argument} is a {type(tensor).__name__}, a wrapper without storage of its own: "
        f"pass the tensor that it wraps (of a DTensor, {argument}.to_local())"
    )


def check_writable(tensor: torch.Tensor, argument: str) -> torch.Tensor:
    """Return a tensor no two elements of which share memory."""
    strides = tensor.stride()
    if (
        0 in strides
        and tensor.numel()  # torch gives empty arrays of numpy strides of zero
        and any(stride == 0 and extent > 1 for stride, extent in zip(strides, tensor.shape, strict=True))
    ):
        raise InvalidUsageError(
            f"{argument} is written to, but its elements share memory (shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}): pass a clone()"
        )
    return tensor


def check_tensors(tensors: object, argument: str, device_types: Sequence[str]) -> Tensors:
    """Return a list of dense tensors."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ArgumentTypeError(
            f"{argument} must be a list of tensors, got {type(tensors).__name__}: {shown(tensors)}"
        )
    for index, tensor in enumerate(tensors):
        check_tensor(tensor, f"{argument}[{index}]", device_types)
    return tensors


def check_one_each(tensors: Tensors, argument: str, world_size: int) -> None:
    """Check that a list has one tensor a rank."""
    if len(tensors) != world_size:
        raise InvalidUsageError(
            f"{argument} must hold one tensor for each of the {world_size} ranks, got {len(tensors)}"
        )


def check_same_dtype(first: torch.Tensor, name: str, others: Tensors, argument: str) -> None:
    """Check that tensors have the dtype of another argument."""
    for index, tensor in enumerate(others):
        check_dtype(first, name, tensor, f"{argument}[{index}]")


def check_dtype(first: torch.Tensor, name: str, other: torch.Tensor, argument: str) -> None:
    """Check that a tensor has the dtype of another argument."""
    if other.dtype is not first.dtype:
        raise InvalidUsageError(f"{argument} has dtype {other.dtype}, but {name} has {first.dtype}")


def check_same_numel(first: torch.Tensor, name: str, others: Tensors, argument: str) -> None:
    """Check that tensors have as many elements as another argument; shapes may differ."""
    for index, tensor in enumerate(others):
        check_numel(first, name, tensor, f"{argument}[{index}]")


def check_numel(first: torch.Tensor, name: str, other: torch.Tensor, argument: str) -> None:
    """Check that a tensor has as many elements as another argument; shapes may differ."""
    if other.numel() != first.numel():
        raise InvalidUsageError(
            f"{argument} has shape {list(other.shape)} ({other.numel()} elements), "
            f"but {name} has {list(first.shape)} ({first.numel()} elements)"
        )


def check_concatenation(whole: torch.Tensor, name: str, part: torch.Tensor, other: str, parts: int) -> None:
    """Check that ``whole`` holds exactly ``parts`` times ``part``, in one dtype."""
    check_dtype(part, other, whole, name)
    if whole.numel() != parts * part.numel():
        raise InvalidUsageError(
            f"{name} must hold {parts} times the {part.numel()} elements of {other} "
            f"(shape {list(part.shape)}), got shape {list(whole.shape)} ({whole.numel()} elements)"
        )


def check_counts(counts: object, argument: str) -> tuple[int, ...]:
    """Return a list of numbers of rows; empty for None."""
    if counts is None:
        return ()
    if not isinstance(counts, (list, tuple)):
        raise ArgumentTypeError(
            f"{argument} must be a list of ints, or None; got {shown(counts)} ({type(counts).__name__})"
        )
    checked = tuple(map(as_int, counts))
    for place, count in enumerate(checked):
        if count is None or count < 0:
            given = shown(counts[place])
            raise InvalidUsageError(f"{argument}[{place}] must be a count of rows, got {given}")
    return cast("tuple[int, ...]", checked)


def check_splits(
    splits: Sequence[int], argument: str, tensor: torch.Tensor, name: str, world_size: int
) -> tuple[int, ...] | None:
    """Return how many rows of dimension 0 go to each rank; None for equal parts."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if len(splits) == 0:
        if rows % world_size:
            raise InvalidUsageError(
                f"{name} has {rows} rows (shape {list(tensor.shape)}), which {world_size} ranks cannot share "
                f"equally: give {argument}"
            )
        return None
    if len(splits) != world_size:
        raise InvalidUsageError(f"{argument} must be {world_size} counts, one a rank, got {list(splits)!r}")
    if sum(splits) != rows:
        raise InvalidUsageError(
            f"{argument} must add up to the {rows} rows of {name}, got {list(splits)} (sum {sum(splits)})"
        )
    return tuple(splits)
