"""`GlooCore`: a Gloo group from connecting to closing, and how its callers wait.

Every call of Gloo that was started has a `Future` in `Calls`. One of Gloo's threads completes the future,
or a thread of dist2 that waits for Gloo. `abort` fails the future at once, although Gloo itself goes on.
Callers only wait for the future, so `abort` frees them.

Gloo's destructor joins its threads, so it must not run on one of them: the only lasting reference to torch's
object is in a box, which a thread of dist2 empties once Gloo has finished all that was started.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from dist2.backends.base import Backend, Execute, GroupSpec
from dist2.backends.carriers import check_carried
from dist2.backends.socket.memory import check_mode
from dist2.errors import (
    BackendError,
    Dist2Error,
    GroupAbortedError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.runtime.deadline import FOREVER_NS, remaining_s
from dist2.runtime.signals import await_end, holds_no_lock, run_outside_locks
from dist2.runtime.threads import Worker

MAX_TAG = (1 << 31) - 1
_DISPOSAL_S = 1.0
"""How long `shutdown` waits for Gloo to close its connections."""
_GRACE_NS = 1_000_000_000
"""Gloo of torch 2.13 ends a call at its deadline and names a rank; that of 2.8 only at the group's."""
_SHORTEST = timedelta(milliseconds=1)
"""Gloo counts milliseconds, and takes zero for no limit."""


class GlooCore(Backend):
    """The common base of all operations of a Gloo group.

    Args:
        spec: Description of the group.
        native: torch's object; this one keeps the only reference.

    Attributes:
        calls: Calls that Gloo has not finished.
        await_end: Waits until a call has ended or a time has come; whether it has ended.
    """

    leaves_at_once = True

    def __init__(self, spec: GroupSpec, native: Any) -> None:
        super().__init__(spec)
        self.calls = Calls()
        self.await_end: Callable[[Future[None], int], bool] = await_end
        self._closed = False
        self._is_stuck = False  # a call did not end in time
        self._box = [native]
        closer = Closer(self._box, self.calls)
        closer.start()
        self._dispose = weakref.finalize(self, closer.begin)
        self._dispose.atexit = False

    @property
    def native(self) -> Any:
        """torch's backend object. Do not keep it.

        Raises:
            GroupAbortedError: It is closed.
        """
        if not self._box:
            raise GroupAbortedError(f"group {self.spec.info.name!r} is closed in this process")
        return self._box[0]

    def plan(self, signature: Signature) -> Execute:
        """Return a callable that runs operations of this signature.

        Raises:
            InvalidUsageError: Gloo cannot do this reduction of this dtype, or has no such tag.
        """
        check_carried(signature)
        if signature.tag > MAX_TAG:
            raise InvalidUsageError(f"tag must be at most {MAX_TAG} with backend 'gloo', got {signature.tag}")
        return super().plan(signature)

    def run(self, operation: Operation, start: Callable[[Any], Any]) -> None:
        """Start a collective of Gloo's and wait until it is done or the group is taken down.

        Args:
            operation: The operation, for errors.
            start: Given torch's object, returns torch's Work.

        Raises:
            Dist2Error: The operation's failure.
        """
        call = self.calls.begin()
        try:
            future = start(self.native).get_future()
        except BaseException as error:
            self.calls.end(call, None)
            raise translate(error, operation) from error
        future.add_done_callback(lambda done: self.calls.end(call, _error_in(done, operation)))
        self.finish(call, operation, _GRACE_NS)

    def finish(self, call: Future[None], operation: Operation, grace_ns: int = 0) -> None:
        """Wait for a call to end, until the operation's deadline and a grace period.

        Raises:
            OperationTimeoutError: It did not end.
            Dist2Error: The operation's failure.
        """
        try:
            has_ended = self.await_end(call, min(operation.deadline_ns + grace_ns, FOREVER_NS))
        except Dist2Error:
            self.give_up()
            raise
        if not has_ended:
            self.give_up()
            group = operation.signature.group
            late = OperationTimeoutError(
                f"{operation.describe()} on {group.backend} did not end within {operation.timeout_s:.3g} s",
                missing=_suspects(operation),
                timeout_s=operation.timeout_s,
            )
            late.locate(
                group.name, operation.signature.kind.value, operation.seq, group.rank, group.global_ranks
            )
            raise late
        call.result()

    def give_up(self) -> None:
        """Note that a call may not end: `shutdown` will not wait for it."""
        self._is_stuck = True

    def shutdown(self) -> None:
        """Wait for all calls, then close the connections. Calls that did not end in time are broken off."""
        if self._closed:
            return
        if self._is_stuck:
            self.abort()
            return
        self._closed = True
        self.calls.wait_quiet(self.spec.timeout_s)
        self._break_off("was shut down", _DISPOSAL_S)

    @holds_no_lock
    def abort(self) -> None:
        """Free blocked callers. Gloo goes on until its deadlines, then closes its connections."""
        if self._closed:
            return
        self._closed = True
        run_outside_locks(f"dist2-abort-{self.spec.info.name}", lambda: self._break_off("was aborted", 0))

    def _break_off(self, how: str, patience_s: float) -> None:
        info = self.spec.info
        error = GroupAbortedError(
            f"group {info.name!r} {how} in this process", group=info.name, rank=info.rank
        )
        self.calls.break_off(error)
        disposal = self._dispose()
        if disposal is not None:
            disposal.join(patience_s)


class Calls:
    """The calls of one group that Gloo has not finished."""

    def __init__(self) -> None:
        self._quiet = threading.Condition()
        self._open: set[Future[None]] = set()
        self._under_way = 0
        self._broken: Dist2Error | None = None

    def begin(self) -> Future[None]:
        """Return the future of a call that is about to be started; `end` completes it.

        Raises:
            Dist2Error: The group was taken down.
            InvalidUsageError: A mode or transform of torch makes tensors without memory: Gloo would follow
                addresses that are none.
        """
        check_mode()
        with self._quiet:
            if self._broken is not None:
                raise self._broken
            call: Future[None] = Future()
            self._open.add(call)
            self._under_way += 1
        return call

    def end(self, call: Future[None], error: BaseException | None) -> None:
        """Gloo has finished a call: complete its future, unless `break_off` has."""
        with self._quiet:
            mine = call in self._open
            self._open.discard(call)
        if mine and error is None:
            call.set_result(None)
        elif mine:
            call.set_exception(error)
        with self._quiet:
            self._under_way -= 1
            self._quiet.notify_all()

    def break_off(self, error: Dist2Error) -> None:
        """Fail pending and later calls. Gloo may still finish those that it has started."""
        with self._quiet:
            self._broken = self._broken or error
            pending, self._open = self._open, set()
        for call in pending:
            call.set_exception(error)

    def wait_quiet(self, timeout_s: float | None = None) -> None:
        """Wait until Gloo has finished all calls that it had started, successfully or not."""
        with self._quiet:
            self._quiet.wait_for(lambda: not self._under_way, timeout_s)


class Closer(Worker):
    """Drops torch's object, once it has finished its calls: its destructor would wait for them.

    The thread starts with the group, as none can start while the process ends.

    Args:
        box: Holds the only reference.
        calls: The calls.
    """

    def __init__(self, box: list[Any], calls: Calls) -> None:
        super().__init__("dist2-gloo-close", self._close)
        self._box = box
        self._calls = calls
        self._asked = threading.Event()

    def begin(self) -> Worker:
        """Have the object dropped; return the thread, to wait for that."""
        self._asked.set()
        return self

    def _close(self) -> None:
        self._asked.wait()
        self._calls.wait_quiet()
        self._box.clear()


def left(operation: Operation) -> timedelta:
    """Return the remaining time of an operation."""
    return max(timedelta(seconds=remaining_s(operation.deadline_ns)), _SHORTEST)


# Errors

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
"""Words of a message of Gloo's, most telling first, and the error that they stand for."""


def error_of(error: RuntimeError, what: str) -> Dist2Error:
    """Return the error for an error of Gloo's.

    Args:
        error: Gloo's; becomes the cause.
        what: The failed action, for the message.
    """
    text = str(error).strip()
    words = text.lower()
    kind = next((kind for sign, kind in _MEANINGS if sign in words), BackendError)
    found: Dist2Error = kind(f"{what} failed: {text}")
    found.__cause__ = error
    return found


def translate(error: BaseException, operation: Operation) -> BaseException:
    """Return the operation's error for an exception that Gloo raised.

    Gloo rarely names the rank at fault. The message quotes Gloo; the fields name a rank where it can only be
    one: the other side of a message, or of a pair.
    """
    if isinstance(error, Dist2Error) or not isinstance(error, RuntimeError):
        return error
    signature = operation.signature
    found = error_of(error, f"{operation.describe()} on {signature.group.backend}")
    group = signature.group
    found.locate(group.name, signature.kind.value, operation.seq, group.rank, group.global_ranks)
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


def _error_in(future: torch.futures.Future[object], operation: Operation) -> BaseException | None:
    try:
        future.value()
    except BaseException as error:  # noqa: BLE001 - handed on
        return translate(error, operation)
    return None
