"""`HugePages`: long tensors that are used repeatedly get pages of 2 MiB, in place of 4 KiB.

A copy from another process translates each page, in the kernel and in the processor. With pages that are 512
times as long there are fewer translations: long calls take a tenth to a third less.

The kernel (Linux 6.1 and later) moves a tensor to such pages in place: its address, content and size stay.
The move costs the savings of many calls, so only tensors that have been in many calls are moved, a part at
each call.

Source: madvise(2), MADV_COLLAPSE.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time_ns

import torch

from dist2.runtime.cache import keep

PAGE_BYTES = 2 << 20
LEAST_BYTES = 2 * PAGE_BYTES
"""So many bytes of a tensor hold at least one whole page."""
_PATIENCE = 64
"""Calls after which a tensor is moved: the cost is recovered in 10 to 50 calls."""
_STRIDE_BYTES = 4 << 20
"""How much of a tensor is moved at a call, which takes some milliseconds longer for it."""
_AGAIN = 1000
"""After so many calls it is seen to again: the memory at an address may be another by then."""
_SLOW_NS_PER_BYTE = 5
"""A call of the kernel that takes longer has to make room first; usual are 0.3 to 1.5."""
_TENSORS = 1024
_COLLAPSE = 25  # MADV_COLLAPSE

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_libc = ctypes.CDLL(None, use_errno=True)  # gives up the interpreter lock for the length of a call


class HugePages:
    """Sees to the tensors that a process uses. For any number of threads.

    Args:
        wanted: Whether it does at all.
        collapse: Has the kernel do it for so many bytes from an address on; as far as it can.
    """

    def __init__(self, wanted: bool, collapse: Callable[[int, int], None] | None = None) -> None:
        self._wanted = wanted
        self._collapse = collapse or _collapse
        self._calls: dict[tuple[int, int], int] = {}

    def see_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that tensors are used by a call that is about to begin."""
        if not self._wanted:
            return
        for tensor in tensors:
            nbytes = tensor.nbytes
            if nbytes >= LEAST_BYTES and tensor.is_contiguous():
                key = tensor.data_ptr(), nbytes
                calls = self._calls.get(key, 0)
                keep(self._calls, key, (calls + 1) % _AGAIN, _TENSORS)
                if calls >= _PATIENCE:
                    self._make(*key, _STRIDE_BYTES * (calls - _PATIENCE))

    def _make(self, address: int, nbytes: int, done: int) -> None:
        """Give huge pages to the memory after the processed bytes: whole pages only."""
        start = -(-(address + done) // PAGE_BYTES) * PAGE_BYTES
        end = min(-(-(address + done + _STRIDE_BYTES) // PAGE_BYTES), (address + nbytes) // PAGE_BYTES)
        length = end * PAGE_BYTES - start
        if length > 0 and not _is_allowed():
            self._wanted = False
        elif length > 0:
            began_ns = thread_time_ns()  # without other processes on this core
            self._collapse(start, length)
            if thread_time_ns() - began_ns > _SLOW_NS_PER_BYTE * length:
                self._wanted = False


def _is_allowed() -> bool:
    """Whether this system has huge pages, and its administrator permits them."""
    try:
        return "[never]" not in _POLICY.read_text()
    except OSError:
        return False


def _collapse(address: int, nbytes: int) -> None:
    # The result is ignored: without huge pages the call only takes longer.
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(_COLLAPSE))
