"""dist2's errors for the texts that torch's backends fail with."""

from __future__ import annotations

from dist2.errors import BackendError, Dist2Error, OperationTimeoutError, PeerLostError
from dist2.operation import Operation

_MEANINGS: tuple[tuple[str, type[OperationTimeoutError | PeerLostError]], ...] = (
    ("application timeout caused pair closure", PeerLostError),
    ("connection closed by peer", PeerLostError),
    ("connection reset by peer", PeerLostError),
    ("connection refused", PeerLostError),
    ("broken pipe", PeerLostError),
    ("socket closed", PeerLostError),
    ("timed out", OperationTimeoutError),
    ("timeout", OperationTimeoutError),
)
"""Words of a library's message, most telling first, and the error that they stand for."""


def error_of(error: RuntimeError, what: str) -> Dist2Error:
    """Return the error for what a library said while it did something.

    Args:
        error: The library's; becomes the cause.
        what: What was done.
    """
    text = str(error).strip()
    words = text.lower()
    kind = next((kind for sign, kind in _MEANINGS if sign in words), BackendError)
    found: Dist2Error = kind(f"{what} failed: {text}")
    found.__cause__ = error
    return found


def translate(error: BaseException, operation: Operation) -> BaseException:
    """Return the error of an operation for what it raised.

    Libraries rarely say which rank is at fault. The message says what they said; the fields name a rank
    where there is only one that it can be: the other side of a message, or of a pair.
    """
    if isinstance(error, Dist2Error) or not isinstance(error, RuntimeError):
        return error
    found = error_of(error, f"{operation.describe()} on {operation.signature.group.backend}")
    if isinstance(found, OperationTimeoutError):
        found.missing, found.timeout_s = _suspects(operation), operation.timeout_s
    elif isinstance(found, PeerLostError):
        found.ranks = _suspects(operation)
    return found


def _suspects(operation: Operation) -> tuple[int, ...]:
    signature = operation.signature
    if signature.peer is not None:
        return (signature.peer,)
    return (1 - signature.group.rank,) if signature.group.world_size == 2 else ()
