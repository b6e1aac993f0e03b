# cython: annotation_typing=False
"""Raw memory of tensors: addresses, and views on shared memory.

Tensors that outlive a call are made outside of inference mode: those made in it cannot be written to outside.
In a mode or transform that makes tensors without memory, such as ``FakeTensorMode``, none can be made.
"""

from __future__ import annotations

import ctypes

import cython
import torch
from cython.cimports.cpython.buffer import PyBUF_WRITE
from cython.cimports.cpython.memoryview import PyMemoryView_FromMemory

from dist2.errors import InvalidUsageError
from dist2.operation.storage import has_no_storage
from dist2.runtime.built import check_built

check_built(__name__, __file__)


@torch.inference_mode(False)
def room_of(nbytes: int) -> torch.Tensor:
    """Return new memory."""
    return _with_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


@torch.inference_mode(False)
def tensor_at(address: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return a flat tensor over memory that is mapped at an address. Keep the mapping alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return _with_memory(torch.frombuffer(memory, dtype=dtype))


def check_mode() -> None:
    """Check that tensors which are made now have memory.

    Raises:
        InvalidUsageError: A mode or transform of the caller makes tensors without.
    """
    _with_memory(torch.empty(1, dtype=torch.uint8, device="cpu"))


def _with_memory(made: torch.Tensor) -> torch.Tensor:
    """Return a tensor that was made, unless a mode or transform of the caller made one without memory."""
    if type(made) is not torch.Tensor or not made.is_cpu or has_no_storage(made):
        kind = f"{type(made).__name__} on {made.device}"
        raise InvalidUsageError(
            f"a mode or transform of torch makes tensors that are no memory ({kind}): call operations of "
            "tensors with memory outside of it"
        )
    return made


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype. Keep the tensor alive."""
    return bytes_at(tensor.data_ptr(), tensor.nbytes)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return memory. Keep alive what it is of."""
    if nbytes == 0:
        return memoryview(b"")
    start = cython.cast(cython.p_char, cython.cast(cython.size_t, address))
    view: memoryview = PyMemoryView_FromMemory(start, nbytes, PyBUF_WRITE)
    return view
