"""Groups without mismatch checks: the difference to others is the cost of these checks.

There is no such switch in the library. These functions remove from one group, in place, the parts that serve
only to find and describe mismatches: the register of this rank's calls, and the line in user
code. The fingerprint in the words of a fence stays: it is a part of a number that is compared anyway.
"""

from __future__ import annotations

from dist2 import ProcessGroup
from dist2.backends.socket.backend import SocketBackend


def without_line(pg: ProcessGroup) -> ProcessGroup:
    """Have a group not look for the line in user code; return it."""
    pg._runner.here = None
    return pg


def without_register(pg: ProcessGroup) -> ProcessGroup:
    """Have a group, not used yet, keep no register of this rank's calls; return it.

    Only where members do not meet in shared memory is there one.
    """
    backend = pg.backend
    if isinstance(backend, SocketBackend):
        backend.endpoint._mailbox.calls.begin = lambda seq, fingerprint: None  # type: ignore[method-assign]  # as above
    return pg
