"""Groups without mismatch checks: the difference to others is the cost of these checks.

There is no such switch in the library. These functions remove from one group, in place, the parts that serve
only to find and describe mismatches: the register of this rank's calls, and the line in user
code. The fingerprint in the words of a fence stays: it is a part of a number that is compared anyway.
"""

from __future__ import annotations

import types
from time import monotonic_ns

from dist2 import ProcessGroup
from dist2.backends.socket.backend import SocketBackend
from dist2.compiled import records
from dist2.operation.runner import OperationRunner, Timeout
from dist2.operation.signature import Operation, Signature
from dist2.runtime.deadline import seconds


def without_line(pg: ProcessGroup) -> ProcessGroup:
    """Have a group not look for the line in user code; return it."""
    runner = pg._runner
    if records is None:
        # A method of this one object is replaced: the difference is measured.
        runner._begin = types.MethodType(_begin, runner)  # type: ignore[method-assign]  # in place of the method
    else:
        assert runner.in_c is not None  # it is there with the parts in C
        runner.in_c.here = None
    return pg


def without_register(pg: ProcessGroup) -> ProcessGroup:
    """Have a group, not used yet, keep no register of this rank's calls; return it.

    Only where members do not meet in shared memory is there one.
    """
    backend = pg.backend
    if isinstance(backend, SocketBackend):
        # As above.
        backend.endpoint.begin = lambda seq, fingerprint: None  # type: ignore[method-assign]  # likewise
        backend.endpoint.ended = lambda seq, met: None  # type: ignore[method-assign]  # likewise
    return pg


def _begin(self: OperationRunner, signature: Signature, async_op: bool, timeout: Timeout) -> Operation:
    """Like `OperationRunner._begin`, without the frame that called."""
    if self.fault is not None:
        raise self.refusal(self.fault)
    created_ns = monotonic_ns()
    limit_ns = self.state.limit_ns if timeout is None else int(seconds(timeout) * 1e9)
    return Operation(signature, 0, created_ns, created_ns + limit_ns, async_op)
