"""Errors of operations: their place is filled in where the code that raised them could not know it."""

from __future__ import annotations

from time import monotonic_ns

from dist2.errors import Dist2Error, GroupRevokedError, OperationTimeoutError, PeerLostError
from dist2.operation.record import Operation


def own(error: Dist2Error) -> Dist2Error:
    """Return a copy for one operation: all that run when a group breaks raise the same error."""
    copy = error.again(str(error))
    copy.__cause__ = error.__cause__
    return copy


def locate(error: Dist2Error, operation: Operation) -> None:
    """Fill in the place of a failed operation."""
    signature = operation.signature
    group = signature.group
    error.locate(group.name, signature.kind.value, operation.seq, group.rank, group.global_ranks)


def name_operation(error: Dist2Error, operation: Operation) -> None:
    """Name the failed operation in the message."""
    if isinstance(error, (OperationTimeoutError, PeerLostError, GroupRevokedError)):
        error.prefix(f"{operation.describe()} in group {operation.signature.group.name!r}")
        if isinstance(error, OperationTimeoutError) and error.timeout_s is None:
            error.timeout_s = operation.timeout_s
            error.elapsed_s = (monotonic_ns() - operation.created_ns) / 1e9
            # torch's words: programs that ran on torch search for them
            words = str(error).removesuffix(" (Timed out)")
            error.args = (
                f"{words}. Timed out after {error.elapsed_s:.3g} s, limit {operation.timeout_s:.3g} s",
            )
