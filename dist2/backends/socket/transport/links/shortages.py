"""Shortages of this process or host: system calls that fail for lack of a resource, not for a peer."""

from __future__ import annotations

import errno
import os

from dist2.errors import ResourceError

_REMEDIES = {
    errno.EMFILE: "close files, or raise the limit of this process (ulimit -n)",
    errno.ENFILE: "close files, or raise the limit of this host (sysctl fs.file-max)",
    errno.ENOBUFS: "free memory on this host",
    errno.ENOMEM: "free memory on this host",
    errno.EADDRNOTAVAIL: "close connections, or widen net.ipv4.ip_local_port_range",
}


def is_shortage(error: OSError) -> bool:
    """Whether a system call has failed for lack of a resource of this process or host."""
    return error.errno in _REMEDIES


def shortage(error: OSError) -> ResourceError:
    """Return the error of a system call that has failed so, with the remedy."""
    code = error.errno or errno.ENOMEM
    return ResourceError(f"{os.strerror(code)}: {_REMEDIES.get(code, _REMEDIES[errno.ENOMEM])}")
