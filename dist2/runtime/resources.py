"""Refusals of the operating system, as errors that name the call, the reason and the remedy.

`system_call` wraps one call; `scarce_resources` also code that calls other libraries: it converts only
errors that no argument can cause. `is_shortage` and `shortage` are for calls on connections, which fail for
their peers too.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from dist2.errors import Dist2Error, ResourceError

_MEMORY = (
    "raise the limits of memory and of address space (of the container, ulimit -v), or start fewer ranks here"
)
_SCARCE = {
    errno.EMFILE: "close files, or raise the limit of descriptors of this process (ulimit -n)",
    errno.ENFILE: "close files, or raise the limit of descriptors of this machine (sysctl fs.file-max)",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.ENOSPC: _MEMORY,
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",  # shared memory is one
}
_OF_CONNECTIONS = {
    **_SCARCE,
    errno.EADDRNOTAVAIL: "close connections, or widen the range (sysctl net.ipv4.ip_local_port_range)",
}
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_NO_THREAD = "can't start new thread"


@contextmanager
def system_call(call: str, instead: str = "") -> Iterator[None]:
    """Convert an `OSError` of a block, which does not depend on arguments of the program.

    Args:
        call: The system call in the block, with its sizes.
        instead: A way to do without it.

    Raises:
        ResourceError: The system refused the call.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, Dist2Error):
            raise
        raise _refused(call, error, instead) from error


@contextmanager
def scarce_resources() -> Iterator[None]:
    """Convert the lack of descriptors, memory or threads in a block, and system calls that are forbidden.

    Raises:
        ResourceError: The system lacked one, or forbids a call.
    """
    try:
        yield
    except MemoryError as error:
        raise ResourceError(f"out of memory: {_MEMORY}", errno=errno.ENOMEM) from error
    except OSError as error:
        if isinstance(error, Dist2Error) or not (error.errno in _SCARCE or _is_forbidden(error)):
            raise
        raise _refused("a system call", error, "") from error
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        message = (
            f"{_NO_THREAD}: raise the limits of threads and memory (the container's pids, ulimit -u, -v); or "
            f"update the container's runtime if its seccomp profile refuses clone3 (Docker before 20.10.10)"
        )
        raise ResourceError(message, call="clone", errno=errno.EAGAIN) from error


def check_scarcity(error: OSError, call: str) -> None:
    """Refuse to take an error for another failure if it tells of a lack of descriptors or memory here.

    Raises:
        ResourceError: It does.
    """
    if error.errno in _SCARCE:
        raise _refused(call, error, "") from error


def _is_forbidden(error: OSError) -> bool:
    """Whether the system refuses a call whatever its arguments: no file is in it that has a mode."""
    return error.errno in (errno.EPERM, errno.ENOSYS) and error.filename is None


def is_shortage(error: OSError) -> bool:
    """Whether a call on a connection has failed for lack of a resource here, and not for its peer."""
    return error.errno in _OF_CONNECTIONS


def shortage(error: OSError, call: str) -> ResourceError:
    """Return the error of such a call."""
    return _refused(call, error, "")


def _refused(call: str, error: OSError, instead: str) -> ResourceError:
    remedy = _OF_CONNECTIONS.get(error.errno or 0, "")
    if error.errno in _FORBIDDEN:
        remedy = "the kernel or a seccomp profile forbids it: allow it; `dist2 doctor` checks the machine"
    remedies = "; or ".join(each for each in (remedy, instead) if each)
    name = errno.errorcode.get(error.errno or 0, "no errno")
    message = f"{call} failed: {error.strerror or error} ({name})" + (f": {remedies}" if remedies else "")
    known = "" if call.startswith("a ") else call.split()[0]
    return ResourceError(message, call=known, errno=error.errno)
