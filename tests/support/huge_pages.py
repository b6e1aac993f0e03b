"""Memory in huge pages, for a process that forks often.

A fork copies the page table. With torch that is 60,000 entries, half of the fork's time. A huge page is one
entry, and stays so in each fork until that writes to the page.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

HUGE_BYTES = 1 << 21
MADV_COLLAPSE = 25
"""Since Linux 6.1; before, the kernel refuses it, and forks take longer."""


def prepare_for_forks() -> None:
    """Move the heap and other private memory of this process to huge pages.

    The garbage collector then skips the objects of now: its marks would have forks copy their pages.
    """
    gc.freeze()
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, inode, name = f"{line} -".split()[:6]
        if access == "rw-p" and inode == "0" and name in ("-", "[heap]"):
            first, end = (int(address, 16) for address in addresses.split("-"))
            for start in range(-(-first // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
                libc.madvise(start, HUGE_BYTES, MADV_COLLAPSE)
