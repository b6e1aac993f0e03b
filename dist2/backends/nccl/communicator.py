# cython: annotation_typing=False
"""`Communicator`: one NCCL communicator, and how it is made, used by one thread at a time, and closed.

cupy's destructor calls `ncclCommDestroy`, which waits for the other ranks of the host: garbage collection
could hang. So each communicator is closed explicitly, by `abort` or `destroy`, after which the destructor has
nothing to do.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

from dist2.backends.nccl.functions import UNIQUE_ID_BYTES, NcclFailure
from dist2.backends.nccl.library import Library
from dist2.errors import BackendError, GroupAbortedError
from dist2.runtime.built import check_built
from dist2.runtime.deadline import remaining_s

check_built(__name__, __file__)

Issued = tuple[str, tuple[Any, ...]]
"""A call to be issued: the name of a method of cupy's communicator, and its arguments but the stream."""

_BLOCKED_NS = 100_000_000
"""A call that has been in NCCL for so long is taken for blocked: `abort` waits no longer for its return.

Counted from its beginning, so it delays no error of an operation whose timeout is longer, and others by this
much at most.
"""
_ABORT_S = 0.5
"""How long a second `abort` waits for the first."""


class Communicator:
    """Issues operations to NCCL.

    Args:
        library: NCCL.
        calls: cupy's communicator, or a `RawCommunicator`; connected, or to be connected by `connect`.

    Attributes:
        library: NCCL.
    """

    def __init__(self, library: Library, calls: Any) -> None:
        self.library = library
        self._calls = calls
        self._lock = threading.Lock()
        self._called_ns = 0
        self._aborting = threading.Lock()
        self._closed = False
        self._aborts = False
        self._had_no_handle = False
        self._ops: dict[tuple[bytes, int], int] = {}

    @classmethod
    def unconnected(cls, library: Library) -> Communicator:
        """Return one that is not connected yet: it can be aborted while `connect` blocks."""
        kind = library.communicator
        kind = getattr(kind, "func", kind)  # the twin comes with its library bound
        return cls(library, kind.__new__(kind))

    def connect(self, size: int, unique_id: bytes, rank: int) -> None:
        """Meet the other ranks; blocks until all have arrived, or another thread aborts this.

        Raises:
            GroupAbortedError: It was aborted before.
        """
        self._check_open()
        bound = getattr(self.library.communicator, "args", ())
        try:
            self._calls.__init__(*bound, size, unique_id, rank)
        except TypeError:  # a version of cupy that wants a tuple of signed bytes; nothing was called
            content = struct.unpack(f"{UNIQUE_ID_BYTES}b", unique_id)
            self._calls.__init__(*bound, size, content, rank)

    @property
    def closed(self) -> bool:
        """Whether it was aborted or destroyed."""
        return self._closed

    @property
    def handle(self) -> int:
        """The library's handle, for calls through ctypes.

        Raises:
            GroupAbortedError: The communicator is closed.
        """
        handle: int = 0 if self._closed or self._aborts else self._calls.comm
        if not handle:
            raise _closed()
        return handle

    def _check_open(self) -> None:
        if self._closed or self._aborts:
            raise _closed()

    def issue(self, calls: Sequence[Issued], stream: int) -> None:
        """Make calls of operations, several of them as one group.

        A group that is left open would swallow all later calls of the thread: it ends if a call fails, too.

        Args:
            calls: The names of cupy's methods, and their arguments without the stream.
            stream: The handle of the stream.

        Raises:
            GroupAbortedError: The communicator is closed.
            BackendError: NCCL refused a call.
        """
        with self._lock:
            self._called_ns = monotonic_ns()
            self._check_open()
            try:
                if len(calls) == 1:
                    ((name, arguments),) = calls
                    getattr(self._calls, name)(*arguments, stream)
                    return
                self.library.group_start()
                try:
                    for name, arguments in calls:
                        getattr(self._calls, name)(*arguments, stream)
                finally:
                    self.library.group_end()
            except Exception as error:
                raise failure(self.library, error) from error

    def premul_sum(self, factor: bytes, datatype: int) -> int:
        """Return the code of a reduction that multiplies by a factor first; it is kept until the end."""
        key = factor, datatype
        if key not in self._ops:
            try:
                self._ops[key] = self.library.functions.premul_sum(self.handle, factor, datatype)
            except NcclFailure as error:
                raise failure(self.library, error) from error
        return self._ops[key]

    def split(self, color: int, key: int) -> Communicator | None:
        """Return a communicator of the ranks with the same color, if it is not negative; all ranks call.

        Raises:
            GroupAbortedError: This one is closed.
        """
        self._check_open()
        made = self._calls.commSplit(color, key)
        return None if made is None else Communicator(self.library, made)

    def async_error(self) -> BackendError | None:
        """Return the communicator's asynchronous error, or None."""
        if not self._lock.acquire(blocking=False):
            return None  # a call or an abort is under way
        try:
            self._called_ns = monotonic_ns()
            if not (self._closed or self._aborts):
                self._calls.check_async_error()
        except Exception as error:  # noqa: BLE001 - cupy raises a KeyError for codes it does not know
            return failure(self.library, error)
        finally:
            self._lock.release()
        return None

    def abort(self) -> None:
        """Abort running operations, and free. Idempotent; a second thread waits for the first.

        A call that another thread has just begun may return first: until then NCCL uses the handle. One that
        blocks is broken off, and returns an error.

        Where another thread has just begun to connect, there is no handle yet to abort by: call this again
        until that thread has returned.
        """
        if self._closed and not self._aborts:
            return  # it is being destroyed, which may take as long as other ranks do
        if not self._aborting.acquire(timeout=_ABORT_S):
            return
        try:
            self._aborts = True  # first: a call that begins now sees this, or is seen by its `_called_ns`
            taken = self._lock.acquire(timeout=remaining_s(self._called_ns + _BLOCKED_NS))
            try:
                if not self._closed or self._had_no_handle:
                    self._closed = True
                    self._had_no_handle = not self._calls.comm
                    self._calls.abort()
            finally:
                if taken:
                    self._lock.release()
        finally:
            self._aborting.release()

    def destroy(self) -> None:
        """Free, together with the other ranks: blocks until they do. Idempotent.

        Nothing may be outstanding.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.destroy()


def _closed() -> GroupAbortedError:
    return GroupAbortedError("the group's communicator was closed in this process")


def failure(library: Library, error: Exception) -> BackendError:
    """Return an error of cupy or of `Functions` as one of dist2's, with NCCL's own words."""
    words = str(error)
    if isinstance(error, KeyError):  # cupy's for codes that it has no name for
        words = library.functions.text_of(int(error.args[0]))
    more = library.functions.last_error()
    return BackendError(f"NCCL failed: {words}" + (f" ({more})" if more else ""))
