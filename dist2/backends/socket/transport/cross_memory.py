"""Reading and writing the memory of another process of this user, by way of the kernel.

The kernel allows it under the same rules as debugging: to the same user, unless containers, Yama or seccomp
forbid it. Whether it does is found out by reading something known, and writing nothing, once a process.

Source: process_vm_readv(2), ptrace(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

from dist2.arena import TOKEN_BYTES, ArenaLocator


class _Stretch(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_NOWHERE = 0
"""An address in the first page, which is left out so that null pointers are noticed."""

_libc = ctypes.CDLL(None, use_errno=True)  # gives up the interpreter lock for the length of a call
_read: Any = getattr(_libc, "process_vm_readv", None)
_write: Any = getattr(_libc, "process_vm_writev", None)
for _call in (_read, _write):
    if _call is not None:
        _call.argtypes = (
            ctypes.c_int,
            ctypes.POINTER(_Stretch),
            ctypes.c_ulong,
            ctypes.POINTER(_Stretch),
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
        _call.restype = ctypes.c_ssize_t


def read(pid: int, dst: int, src: int, nbytes: int) -> None:
    """Copy from address ``src`` of another process to ``dst`` in this one.

    Raises:
        OSError: The process is gone, the memory is not mapped, or it may not be read.
    """
    _move(_read, pid, dst, src, nbytes)


def write(pid: int, dst: int, src: int, nbytes: int) -> None:
    """Copy from address ``src`` in this process to ``dst`` of another one; raises as `read`."""
    _move(_write, pid, src, dst, nbytes)


def bound_read(pid: int, dst: int, src: int, nbytes: int) -> Callable[[], None]:
    """Return a function that does one `read` each time it is called, with its arguments made beforehand."""
    return _bound(_read, pid, dst, src, nbytes)


def bound_write(pid: int, dst: int, src: int, nbytes: int) -> Callable[[], None]:
    """Return a function that does one `write` each time it is called, with its arguments made beforehand."""
    return _bound(_write, pid, src, dst, nbytes)


def can_reach(locator: ArenaLocator) -> bool:
    """Whether another process's memory can be read and written.

    To read is tried on the name of its arena. To write is not, not even what was read a moment ago: the
    process may have given up that arena meanwhile, and have something else at its address.
    """
    if locator.pid == os.getpid():
        return _read is not None
    if _read is None or _write is None or not locator.address:
        return False
    found = ctypes.create_string_buffer(TOKEN_BYTES)
    here = ctypes.addressof(found)
    try:
        read(locator.pid, here, locator.address, TOKEN_BYTES)
    except OSError:
        return False
    return found.raw.hex() == locator.token and _may_write(locator.pid, here)


def _may_write(pid: int, src: int) -> bool:
    """Whether the kernel allows to write, asked where no process has memory: it looks at that afterwards."""
    try:
        write(pid, _NOWHERE, src, 1)
    except OSError as error:
        return error.errno == errno.EFAULT
    return True


def _move(call: Any, pid: int, here: int, there: int, nbytes: int) -> None:
    while nbytes > 0:  # the kernel moves less than 2 GiB at a time
        local, remote = _Stretch(here, nbytes), _Stretch(there, nbytes)
        moved = call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"memory of process {pid}: {os.strerror(number)}")
        here, there, nbytes = here + moved, there + moved, nbytes - moved


def _bound(call: Any, pid: int, here: int, there: int, nbytes: int) -> Callable[[], None]:
    # The references keep what they refer to alive.
    local, remote = ctypes.byref(_Stretch(here, nbytes)), ctypes.byref(_Stretch(there, nbytes))

    def move() -> None:
        if call(pid, local, 1, remote, 1, 0) != nbytes:  # it failed, or is longer than one call moves
            _move(call, pid, here, there, nbytes)

    return move
