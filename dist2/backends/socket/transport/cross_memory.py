"""Reading the memory of another process of this user, by way of the kernel.

The kernel allows it under the same rules as debugging: to the same user, unless containers, Yama or seccomp
forbid it. A test read of known bytes, once a process, shows whether it does.

A process is identified by its process id. After its end another process may get that id. So a reader checks
afterwards whether the process is still alive (`has_ended`), and discards the bytes if it is not.

No rank writes another's memory: its owner may reuse it at any moment.

Source: process_vm_readv(2), ptrace(2), pidfd_open(2).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from dist2.runtime.shared_memory import TOKEN_BYTES, ArenaLocator


class _Stretch(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # gives up the interpreter lock for the length of a call
_read: Any = getattr(_libc, "process_vm_readv", None)
if _read is not None:
    _read.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Stretch),
        ctypes.c_ulong,
        ctypes.POINTER(_Stretch),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    _read.restype = ctypes.c_ssize_t


def read(pid: int, dst: int, src: int, nbytes: int) -> None:
    """Copy from address ``src`` of another process to ``dst`` in this one.

    Raises:
        OSError: The process is gone, the memory is not mapped, or it may not be read.
    """
    while nbytes > 0:  # the kernel moves less than 2 GiB at a time
        local, remote = _Stretch(dst, nbytes), _Stretch(src, nbytes)
        moved = _read(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"memory of process {pid}: {os.strerror(number)}")
        dst, src, nbytes = dst + moved, src + moved, nbytes - moved


def can_reach(locator: ArenaLocator) -> bool:
    """Whether another process's memory can be read: it is tried on the name of its arena."""
    if locator.pid == os.getpid():
        return _read is not None
    if _read is None or not locator.address:
        return False
    found = ctypes.create_string_buffer(TOKEN_BYTES)
    here = ctypes.addressof(found)
    try:
        read(locator.pid, here, locator.address, TOKEN_BYTES)
    except OSError:
        return False
    return found.raw.hex() == locator.token
