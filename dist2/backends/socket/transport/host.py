"""Grouping of ranks by host, so that they can share memory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DESCRIPTORS = Path("/proc/self/fd")


def host_id() -> str:
    """Return an id that is equal for processes that can map each other's memory.

    Made of the boot, the process namespace (ids of processes are exchanged) and the user (memory is
    for the same user only). The network namespace counts as well: processes that are kept apart by it
    are treated as on different hosts. So is a process whose memory no other can open: see `_is_closed`.
    ``DIST2_HOST_ID`` overrides it (see `dist2.runtime.config`).
    """
    parts = [_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else os.uname().nodename, str(os.getuid())]
    parts += [_namespace(name) for name in ("pid", "net")]
    if _is_closed():
        parts.append(f"process {os.getpid()}")
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()


def _is_closed() -> bool:
    """Whether no other process of this user can open what this one has open.

    So it is after a change of user or of capabilities (Linux calls the process not dumpable, and gives its
    descriptors to root), and in a sandbox without ``/proc``.
    """
    try:
        return _DESCRIPTORS.stat().st_uid != os.geteuid()
    except OSError:
        return True


def _namespace(name: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{name}").readlink())
    except OSError:
        return "unknown"
