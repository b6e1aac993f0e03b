# cython: language_level=3
"""Reading the memory of another process of this user, by way of the kernel.

The kernel allows it under the same rules as debugging: to the same user, unless containers, Yama or seccomp
forbid it. A test read of known bytes, once a process, shows whether it does.

A process is identified by its process id. After its end another process may get that id. So a reader checks
afterwards whether the process is still alive (`has_ended`), and discards the bytes if it is not.

No rank writes another's memory: its owner may reuse it at any moment.

Source: process_vm_readv(2), ptrace(2), pidfd_open(2).
"""

from libc.errno cimport errno

import os

from dist2.runtime.shared_memory import TOKEN_BYTES

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    Py_ssize_t process_vm_readv(int, const iovec *, unsigned long, const iovec *, unsigned long, unsigned long)


def read(int pid, size_t dst, size_t src, size_t nbytes):
    """Copy from address ``src`` of another process to ``dst`` in this one.

    Raises:
        OSError: The process is gone, the memory is not mapped, or it may not be read.
    """
    cdef iovec local, remote
    cdef size_t done = 0
    cdef Py_ssize_t moved
    while done < nbytes:  # the kernel moves less than 2 GiB at a time
        local.iov_base, remote.iov_base = <void *>(dst + done), <void *>(src + done)
        local.iov_len = remote.iov_len = nbytes - done
        with nogil:
            moved = process_vm_readv(pid, &local, 1, &remote, 1, 0)
        if moved <= 0:
            raise OSError(errno, f"memory of process {pid}: {os.strerror(errno)}")
        done += moved


def can_reach(locator):
    """Whether another process's memory can be read: it is tried on the name of its arena (`ArenaLocator`)."""
    if locator.pid == os.getpid():
        return True
    if not locator.address:
        return False
    found = bytearray(TOKEN_BYTES)
    try:
        read(locator.pid, <size_t><char *>found, locator.address, TOKEN_BYTES)
    except OSError:
        return False
    return found.hex() == locator.token
