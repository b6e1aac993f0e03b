"""Memory that processes of one host share: anonymous files that peers open by process and descriptor.

An arena is a memfd. It has no name, so nothing can be left behind in ``/dev/shm``, whose size (64 MiB
in many containers) does not limit it either; it goes when the last process that maps it goes. A peer
opens it through ``/proc/<pid>/fd/<fd>``, which the kernel allows to the same user only. Pages cost
memory when first touched.

Source: memfd_create(2), proc(5).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from contextlib import ExitStack, suppress

import attrs

from dist2.errors import PeerLostError, ResourceError
from dist2.runtime.resources import check_scarcity, system_call

TOKEN_BYTES = 16
PAGE_BYTES = mmap.PAGESIZE
INSTEAD = "set DIST2_TRANSPORT=tcp on all ranks, which needs no shared memory"
_BLOCK_BYTES = 512  # of what stat(2) counts


@attrs.frozen
class ArenaLocator:
    """Where a peer finds an arena.

    Attributes:
        pid: The process that made it.
        fd: Its descriptor there.
        nbytes: Its size.
        token: Hex of its first bytes: tells it from the content of a reused pid or descriptor.
        address: Where that process has it mapped.
    """

    pid: int
    fd: int
    nbytes: int
    token: str
    address: int = 0

    def __str__(self) -> str:
        return f"{self.pid}:{self.fd}:{self.nbytes}:{self.token}:{self.address}"

    @classmethod
    def parse(cls, text: str) -> ArenaLocator:
        pid, fd, nbytes, token, address = text.split(":")
        return cls(int(pid), int(fd), int(nbytes), token, int(address))


class Mapping:
    """An arena as this process sees it.

    Attributes:
        view: All of it, as bytes.
        address: Where it is mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        gib = nbytes >> 30
        with system_call(f"mmap of {gib} GiB of address space for shared memory", INSTEAD):
            self.map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self.map)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def words(self, offset: int, count: int) -> memoryview:
        """Return ``count`` 64-bit words from a byte offset; reads and writes of one are atomic on x86-64."""
        return self.view[offset : offset + 8 * count].cast("Q")


def open_of(pid: int, fd: int, flags: int, name: str) -> int:
    """Open a descriptor of another process of this host once more; return the new one.

    Args:
        pid: The process.
        fd: Its descriptor.
        flags: As for `os.open`.
        name: Of the object behind it, for errors.

    Raises:
        PeerLostError: The process is gone.
        ResourceError: This one may not look into it, or lacks descriptors or memory.
    """
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
    except PermissionError as error:
        raise ResourceError(
            f"the {name} of process {pid} cannot be opened: {error.strerror}: that process or this one has "
            f"changed its user or capabilities, or a security module keeps them apart; {INSTEAD}",
            call="open",
            errno=error.errno,
        ) from error
    except OSError as error:
        check_scarcity(error, f"open of another rank's {name}")
        raise PeerLostError(f"{name} of process {pid} cannot be opened: {error.strerror}") from error


_mapped: weakref.WeakValueDictionary[tuple[int, int], Mapping] = weakref.WeakValueDictionary()
"""The arenas that this process has mapped, its own and others', by device and inode of the file."""


def attach(locator: ArenaLocator) -> Mapping:
    """Return a peer's arena, mapped once in this process.

    Ranks that are threads would otherwise each map the arenas of all others, of 40 GiB each: 64 ranks have
    more address space reserved so than there is.

    Raises:
        PeerLostError: The process is gone.
        ResourceError: See `open_of`.
    """
    fd = open_of(locator.pid, locator.fd, os.O_RDWR, "shared memory")
    try:
        status = os.fstat(fd)
        if status.st_size != locator.nbytes:
            raise PeerLostError(f"shared memory of process {locator.pid} has changed: the process is gone")
        file = (status.st_dev, status.st_ino)
        mapping = _mapped.get(file) or Mapping(fd, locator.nbytes)
    finally:
        os.close(fd)
    if bytes(mapping.view[:TOKEN_BYTES]).hex() != locator.token:
        raise PeerLostError(f"shared memory of process {locator.pid} has changed: the process is gone")
    _mapped[file] = mapping
    return mapping


def touched_bytes() -> int:
    """Return how much memory the arenas of this process take: of what they reserve, the pages touched."""
    arenas = [each for each in list(_mapped.values()) if isinstance(each, Arena)]
    touched = 0
    for arena in arenas:
        with suppress(OSError):  # closed meanwhile
            touched += os.fstat(arena.fd).st_blocks * _BLOCK_BYTES
    return touched


class Arena(Mapping):
    """An arena of this process, with an allocator: first fit over page-sized free ranges.

    Attributes:
        locator: For peers.
    """

    def __init__(self, nbytes: int) -> None:
        with ExitStack() as failed:
            with system_call("memfd_create", INSTEAD):
                self.fd = os.memfd_create("dist2", os.MFD_CLOEXEC)
            failed.callback(os.close, self.fd)
            with system_call("fchmod", INSTEAD):  # the default mode would admit all users to /proc/<pid>/fd
                os.fchmod(self.fd, 0o600)
            with system_call(f"ftruncate of shared memory to {nbytes >> 30} GiB", INSTEAD):
                os.ftruncate(self.fd, nbytes)
            super().__init__(self.fd, nbytes)
            failed.pop_all()
        token = secrets.token_hex(TOKEN_BYTES)
        self.locator = ArenaLocator(os.getpid(), self.fd, nbytes, token, self.address)
        self.view[:TOKEN_BYTES] = bytes.fromhex(self.locator.token)
        status = os.fstat(self.fd)
        _mapped[status.st_dev, status.st_ino] = self
        self._free = [(PAGE_BYTES, nbytes)]

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of zeroed memory, page aligned; None if nothing so large is free."""
        wanted = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= wanted:
                self._free[index : index + 1] = [(start + wanted, stop)] if stop - start > wanted else []
                return start
        return None

    def release(self, offset: int, nbytes: int) -> None:
        """Give memory back, to the kernel too if that takes it: it reads as zeros when allocated again."""
        length = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        try:
            self.map.madvise(mmap.MADV_REMOVE, offset, length)
        except OSError:  # refused, as by gVisor: then it only reads as zeros
            ctypes.memset(self.address + offset, 0, length)
        ranges = sorted([*self._free, (offset, offset + length)])
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = merged

    def close(self) -> None:
        """Close the descriptor: no process can attach any more. The mapping goes with its last user."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
