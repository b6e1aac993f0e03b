"""`shared_empty`: tensors in memory that the other processes of this host can map.

Collectives on them copy nothing into shared memory: the other ranks read them in place.
The memory is part of one anonymous file a process (see `dist2.runtime.shared_memory`). Peers map the file
when they first meet a tensor in it.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from dist2.errors import Dist2Error, InvalidUsageError, ResourceError
from dist2.operation.engine import WORDS_OF_CONTROL, share
from dist2.runtime.arguments import as_int
from dist2.runtime.process import InChild, in_child
from dist2.runtime.shared_memory import Arena, ArenaLocator

HEADER_WORDS: int = WORDS_OF_CONTROL["HEADER_WORDS"]
IS_MAPPED: int = WORDS_OF_CONTROL["IS_MAPPED"]


def shared_empty(*shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised CPU tensor that collectives need not copy to share it.

    It is an ordinary tensor in all else; views and slices of it are shared as well. Ranks may mix shared
    and ordinary tensors in one collective. The memory goes when the tensor and its views are gone. In a
    forked child the tensor still is the parent's memory, but is an ordinary tensor to the child's groups.
    Where the system refuses memory that processes share, it is an ordinary tensor from the beginning.

    Args:
        shape: Extents, as numbers or as one sequence.
        dtype: By default torch's default dtype.

    Raises:
        InvalidUsageError: An extent is not a whole number of at least 0, or the dtype is not a dtype.
        Dist2Error: More memory than the machine has is in use by such tensors.

    Examples:
        >>> tensor = dist2.shared_empty(2, 3).fill_(1.0)
        >>> pg.all_reduce(tensor)
        >>> tensor[0]
        tensor([2., 2., 2.])
    """
    extents = _extents(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise InvalidUsageError(f"dtype must be a torch.dtype, got {dtype!r} ({type(dtype).__name__})")
    numel = math.prod(extents)
    if numel == 0 or not hasattr(os, "memfd_create"):
        return torch.empty(extents, dtype=dtype, device="cpu")
    try:
        memory = _process.memory().allocate(numel * dtype.itemsize)
    except ResourceError:  # no memory that processes share: groups here use connections
        return torch.empty(extents, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel).view(extents)


def header_of(locator: ArenaLocator) -> list[int]:
    """Return the words by which a table of exposed memory names the file that it lies in."""
    token = bytes.fromhex(locator.token)
    halves = [int.from_bytes(token[at : at + 8], "little") for at in (0, 8)]
    return [IS_MAPPED, 0, locator.fd, locator.nbytes, locator.address, *halves]


def locator_in(header: Sequence[int], pid: int) -> ArenaLocator:
    """Return the file that a process names in these words: the inverse of `header_of`."""
    _, _, fd, nbytes, address, *halves = header
    token = b"".join([half.to_bytes(8, "little") for half in halves])
    return ArenaLocator(pid, fd, nbytes, token.hex(), address)


def _forget() -> None:
    """Have plans know no shared tensors of this process."""
    share(0, 0, [0] * HEADER_WORDS)


def _extents(shape: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    extents = []
    for extent in given:
        found = as_int(extent)
        if found is None or found < 0:
            raise InvalidUsageError(f"shape must consist of numbers of at least 0, got {given!r}")
        extents.append(found)
    return tuple(extents)


class TensorMemory:
    """The file that a process's shared tensors lie in.

    Attributes:
        arena: The file: as much address space as the machine has memory; only used pages cost memory.
    """

    def __init__(self) -> None:
        self.arena = Arena(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return zeroed memory, which is freed with the last reference to the array.

        Raises:
            Dist2Error: There is no room.
        """
        with self._lock:
            self._take_back()
            offset = self.arena.allocate(nbytes)
        if offset is None:
            raise Dist2Error(f"shared tensors of this process have no room for {nbytes} bytes more")
        memory = (ctypes.c_char * nbytes).from_address(self.arena.address + offset)
        weakref.finalize(memory, self._give_back, offset, nbytes).atexit = False
        return memory

    def _give_back(self, offset: int, nbytes: int) -> None:
        """Free memory: at once, unless the collector interrupts an allocation."""
        if self.arena.locator.pid != os.getpid():
            return  # a forked child drops its copy of a tensor; the memory is the parent's
        self._returned.append((offset, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            self.arena.release(*self._returned.popleft())


class _Process:
    """The shared memory of this process, made on first use; a forked child starts without."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: TensorMemory | None = None

    def known(self) -> TensorMemory | None:
        """Return the memory if there is any."""
        memory = self._memory
        return memory if memory is not None and memory.arena.locator.pid == os.getpid() else None

    def memory(self) -> TensorMemory:
        """Return the memory, making it for the first tensor."""
        with self._lock:
            memory = self.known()
            if memory is None:
                memory = self._memory = TensorMemory()
                arena = memory.arena
                share(arena.address, arena.nbytes, header_of(arena.locator))
            return memory


_process = _Process()
in_child(InChild.SHARED_TENSORS)(_forget)
