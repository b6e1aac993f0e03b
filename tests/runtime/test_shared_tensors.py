"""Shared tensors: ordinary to their owner, found by peers, and freed without references."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import dist2
from dist2 import InvalidUsageError
from dist2.backends import shared_tensors
from dist2.backends.shared_tensors import TensorMemory
from dist2.runtime.shared_memory import ArenaLocator, attach

MIB = 1 << 20


def resident_bytes(memory: TensorMemory) -> int:
    """Return the memory that an arena really uses."""
    return os.fstat(memory.arena.fd).st_blocks * 512


def test_a_shared_tensor_is_an_ordinary_tensor() -> None:
    tensor = dist2.shared_empty(3, 4)
    assert tensor.shape == (3, 4)
    assert tensor.dtype is torch.get_default_dtype()
    tensor.copy_(torch.arange(12.0).view(3, 4))
    assert tensor.sum().item() == 66
    assert (tensor @ tensor.T).shape == (3, 3)
    assert dist2.shared_empty((2, 5), dtype=torch.bfloat16).shape == (2, 5)
    assert dist2.shared_empty([7], dtype=torch.bool).dtype is torch.bool
    assert dist2.shared_empty().shape == ()
    assert dist2.shared_empty(0, 3).numel() == 0
    leaf = dist2.shared_empty(4).fill_(1.0).requires_grad_()
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("shape", [(-1,), (2.0,), ((2, "x"),), (True,)])
def test_a_bad_shape_is_refused(shape: tuple[object, ...]) -> None:
    with pytest.raises(InvalidUsageError, match="shape"):
        dist2.shared_empty(*shape)


def test_a_dtype_that_is_none_is_named() -> None:
    with pytest.raises(InvalidUsageError, match=r"dtype must be a torch.dtype, got 'float' \(str\)"):
        dist2.shared_empty(2, dtype="float")


def locator_of(tensor: torch.Tensor) -> ArenaLocator | None:
    """Return where peers find the file that a tensor lies in; None if it lies in none of this process."""
    memory = shared_tensors._process.known()
    if memory is None:
        return None
    arena = memory.arena
    return arena.locator if arena.address <= tensor.data_ptr() < arena.address + arena.nbytes else None


def test_peers_see_what_the_owner_writes() -> None:
    tensor = dist2.shared_empty(1000).fill_(1.0)
    part = tensor[500:]
    locator = locator_of(tensor)
    assert locator is not None
    there = attach(locator)
    part.fill_(2.5)
    offset = part.data_ptr() - locator.address
    assert torch.frombuffer(there.view[offset : offset + 2000], dtype=torch.float32).tolist() == [2.5] * 500
    assert locator_of(part) == locator
    assert locator_of(torch.empty(4)) is None


def test_memory_goes_with_the_last_view() -> None:
    memory = TensorMemory()
    array = memory.allocate(8 * MIB)
    tensor = torch.frombuffer(array, dtype=torch.uint8).fill_(1)
    view = tensor[MIB : 2 * MIB]
    del array, tensor
    gc.collect()
    assert resident_bytes(memory) >= 8 * MIB
    assert view[0].item() == 1
    del view
    gc.collect()
    assert resident_bytes(memory) == 4096  # the page that names the arena
    again = memory.allocate(8 * MIB)
    assert not any(again[:: 1 << 16])  # its first bytes are those given back, and zero
    del again
    memory.arena.close()


def test_memory_given_back_in_the_middle_of_an_allocation_is_taken_later() -> None:
    memory = TensorMemory()
    array = memory.allocate(MIB)
    with memory._lock:  # as if the garbage collector came while the allocator is at work
        del array
        gc.collect()
    assert memory._returned
    second = memory.allocate(MIB)
    assert not memory._returned
    del second
    memory.arena.close()


def test_a_child_neither_frees_nor_offers_its_parents_memory() -> None:
    tensor = dist2.shared_empty(MIB).fill_(3.0)
    child = os.fork()
    if child == 0:
        status = 0 if locator_of(tensor) is None else 1
        del tensor
        gc.collect()
        own = dist2.shared_empty(4)
        found = locator_of(own)
        status |= 0 if found is not None and found.pid == os.getpid() else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensor.eq(3.0).all()


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(dist2.Dist2Error, match="no room"):
        dist2.shared_empty(1 << 46, dtype=torch.uint8)
