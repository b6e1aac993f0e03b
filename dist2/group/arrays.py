"""Arrays of other libraries as arguments of operations: numpy's, and those with ``__dlpack__``.

An array becomes a tensor that shares its memory, so that results are written in place. The check of a call
without a cached plan makes it: arrays are never found among the plans, and tensors are not looked at here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, TypeAlias

import torch

from dist2.errors import InvalidUsageError

_CPU = 1
"""``kDLCPU`` of DLPack."""


class SupportsDLPack(Protocol):
    """An array of any library that exports its memory by DLPack: numpy's, cupy's, JAX's.

    Source: the array API standard.
    """

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


Array: TypeAlias = torch.Tensor | SupportsDLPack
"""What operations take: the type of their arguments."""


def as_tensor(value: object, argument: str, written: bool) -> object:
    """Return a tensor with the memory of an array; other objects as they are, for validation.

    Args:
        value: A tensor, an array or any other object.
        argument: Its name.
        written: Whether the operation writes to it.

    Raises:
        InvalidUsageError: It is written to and read-only, or torch cannot take it.
    """
    array: Any = value
    if isinstance(value, torch.Tensor) or not hasattr(type(value), "__dlpack__"):
        return value
    name = type(value).__name__
    if written and not _is_writable(array):
        raise InvalidUsageError(
            f"{argument} is a read-only array ({name}), and the operation writes to it: pass a writable one, "
            f"such as a copy"
        )
    try:
        return _tensor_of(array)
    except (AssertionError, BufferError, RuntimeError, TypeError, ValueError) as error:  # the first: no CUDA
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InvalidUsageError(
            f"{argument} is an array ({name}) that torch cannot take ({reason}): {_remedy(array)}"
        ) from error


def _remedy(array: Any) -> str:
    device = int(array.__dlpack_device__()[0])
    if _is_masked(array):
        return "pass its data, or a copy with values in place of the masked ones (filled)"
    if device == _CPU:
        return "pass a copy with positive strides, a dtype of torch and the byte order of this machine"
    name = {2: "CUDA", 10: "ROCm"}.get(device, f"DLPack's type {device}")
    return f"its memory is on a device ({name}): pass a copy in host memory, or install torch's build for it"


def _tensor_of(array: Any) -> torch.Tensor:
    if _is_masked(array):
        raise ValueError("its mask would be lost")
    if type(array).__module__ == "numpy":
        return torch.from_numpy(array if array.flags.writeable else array.copy())  # else torch warns
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        raise ValueError("a stride is negative")  # `torch.from_dlpack` ends the process
    return torch.from_dlpack(array)


def _is_masked(array: Any) -> bool:
    return type(array).__module__.startswith("numpy.ma")


def _is_writable(array: Any) -> bool:
    """Whether an array may be written to: by its flag, or by that of numpy's view of it."""
    if type(array).__module__ != "numpy":
        if array.__dlpack_device__()[0] != _CPU or not hasattr(type(array), "__array__"):
            return True  # arrays on devices have no such flag
        array = import_module("numpy").asarray(array)
    return bool(array.flags.writeable)
