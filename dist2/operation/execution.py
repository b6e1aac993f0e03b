# cython: annotation_typing=False
"""The types by which a group's runner and a backend hand operations to each other.

A backend plans each signature once, as an `Execute`: a callable that runs one operation on the tensors of a
call. It returns None for an operation that is complete, or an object that completes later: a `Future`, or a
`Helped` where the thread that waits can speed it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from dist2.errors import GroupRevokedError
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.runtime.built import check_built
from dist2.runtime.rank_names import RankNames

check_built(__name__, __file__)

Tensors = Sequence[torch.Tensor]


class Helped:
    """The rest of an operation that completes faster if the thread that waits for it helps.

    It has the few methods of a `Future` that a group uses, without a lock and a condition for each.
    """

    def add_done_callback(self, callback: Callable[[Helped], None]) -> None:
        """Call back once it is done: at once if it is, else from the thread that completes it.

        Args:
            callback: Of the call that began it; there is no second one.
        """
        raise NotImplementedError

    def exception(self) -> BaseException | None:
        """Return its error, once it is done."""
        raise NotImplementedError

    def help(self, deadline_ns: int) -> None:
        """Work on it until it is done or the deadline passes, without raising its error."""
        raise NotImplementedError


class StreamOrdered(Helped):
    """An operation on a stream of a device. Waiting for it orders the caller's later work behind it.

    Attributes:
        over: Whether it is known to be done, or to have failed; threads that wait are notified at that time.
    """

    over: bool

    def poll(self) -> None:
        """Complete it now, if the device has done it."""
        raise NotImplementedError

    def order(self) -> None:
        """Have the caller's current stream wait for it; where the caller is that stream, wait.

        Raises:
            Dist2Error: The operation's failure, if it is known already.
        """
        raise NotImplementedError

    def future(self, outputs: Tensors) -> torch.futures.Future[Any] | None:
        """Return a torch future of the outputs that is done in the order of the stream.

        None where only the host can tell, or where the operation has failed.
        """
        raise NotImplementedError

    def duration_ms(self) -> float | None:
        """Return how long the device took, if that was measured and it is done."""
        raise NotImplementedError


Outcome = Future[None] | Helped | None
"""None: the operation is complete. Otherwise it was started and completes later."""

Job = Callable[[], BaseException | None]
"""Work for later. It must not raise; it returns an exception that concerns the thread that ran it."""

Execute = Callable[[Operation, Tensors, Tensors], Outcome]
"""Runs one operation on its inputs and outputs."""


class Executor(Protocol):
    """The part of a backend that a runner uses; `dist2.backends.base.Backend` documents it."""

    natively_async: ClassVar[bool]
    stream_ordered: ClassVar[bool]
    frees_tensors: bool
    device_types: tuple[str, ...]
    staged_types: tuple[str, ...]
    revoked: GroupRevokedError | None
    on_revoked: Callable[[GroupRevokedError], None]

    @property
    def names(self) -> RankNames:
        """The names of the members in texts."""

    def plan(self, signature: Signature) -> Execute:
        """Return a callable that runs operations of this signature."""

    def plan_plain(self, signature: Signature) -> Execute:
        """Like `plan`, for calls whose tensors are contiguous and not lazily conjugated or negated."""

    def together(self) -> AbstractContextManager[object]:
        """Start the messages that the calling thread issues in a ``with`` block together, at its end."""

    def bound(self, job: Job) -> Job:
        """Return a job that runs on another thread as it would run now: on the same stream, say."""

    def look(self) -> None:
        """Process, without waiting, messages of other members about the group's state."""

    def waited_ns(self) -> int | None:
        """Return for how long operations have waited for other ranks, in nanoseconds; None if not known."""

    def lost(self) -> Mapping[int, str]:
        """Return the group ranks that are known to have died."""

    def broken_by(self, error: BaseException) -> None:
        """Take in the error that broke the group on this rank."""

    def shutdown(self) -> None:
        """Release the resources of the group."""
