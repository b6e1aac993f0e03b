"""The file under a FileStore: a log to which all processes append.

Theory of operation: a step of the store takes the file's lock (shared to read, exclusive to write), replays
the records that others have appended since its last step, and appends its own with one write. So a reader
without a lock, or a crash, sees whole records and at most one unfinished end, which the next writer
truncates. The file may be removed, or replaced by a new one, while a process waits for the lock: the link
count tells.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from dist2.errors import StoreError, StoreTimeoutError
from dist2.runtime.deadline import Deadline
from dist2.store.file_format import check_beginning, encode_record, replay
from dist2.store.table import counted

_T = TypeVar("_T")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005


class SharedLog:
    """The keys of a file that several processes change.

    A step given to `read` or `update` runs under the file's lock, with `values` up to date.

    Attributes:
        path: The file, as given.
        values: The values of all keys, the store's own included.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.values: dict[bytes, bytes] = {}
        self._position = 0
        # Stays open: the kernel cannot reuse its inode number, so a replaced file is recognised.
        self._descriptor = -1
        self._opened = False
        self._lock = threading.RLock()

    def read(self, step: Callable[[], _T], deadline: Deadline) -> _T:
        """Run a step that only reads; others may read at the same time.

        Raises:
            StoreError: The file was removed or replaced, or cannot be read.
            StoreTimeoutError: Other processes kept it locked.
        """
        return self._locked(fcntl.LOCK_SH, step, deadline)

    def update(self, step: Callable[[], _T], deadline: Deadline) -> _T:
        """Run a step that may `write`, alone. The first one makes the file if it is not there.

        Raises:
            StoreError: The file was removed or replaced, or cannot be written.
            StoreTimeoutError: Others kept it locked.
        """
        return self._locked(fcntl.LOCK_EX, step, deadline)

    def write(self, key: bytes, value: bytes) -> None:
        """In an `update`: give a key a value."""
        self._append(encode_record(key, value))
        self.values[key] = value

    def write_record(self, record: bytes) -> None:
        """In an `update`: add a record."""
        self._append(record)
        replay(record, self.values)

    def increase(self, key: bytes, amount: int) -> int:
        """In an `update`: add to a counter; return its new value.

        Raises:
            InvalidUsageError: The key holds no integer, or the sum does not fit 64 bits.
        """
        total = counted(key, self.values.get(key, b"0"), amount)
        self.write(key, b"%d" % total)
        return total

    def remove(self) -> None:
        """In an `update`: remove the file. Processes that wait for its lock will notice."""
        os.unlink(self.path)  # noqa: PTH108 - the descriptor calls of this module belong together

    def is_gone(self) -> bool:
        """Whether the file that this has open was removed."""
        return self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Free the descriptor. A later step would open the file again."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def abandon(self) -> None:
        """In a forked child: close the descriptor, whose locks are shared with the parent."""
        self._lock = threading.RLock()
        self.close()

    def _append(self, data: bytes) -> None:
        # One write, so that a reader without locks, or a crash, sees all of it or an unfinished end.
        written = os.pwrite(self._descriptor, data, self._position)
        if written != len(data):
            os.ftruncate(self._descriptor, self._position)
            raise StoreError(
                f"FileStore {self.path!r}: wrote {written} of {len(data)} bytes; is the disk full?"
            )
        self._position += written

    def _locked(self, kind: int, step: Callable[[], _T], deadline: Deadline) -> _T:
        try:
            with self._lock:
                self._take_lock(kind, deadline)
                try:
                    self._catch_up(kind)
                    return step()
                finally:
                    if self._descriptor >= 0:
                        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        except StoreError:  # a timeout is an OSError as well
            raise
        except OSError as error:
            raise StoreError(f"FileStore {self.path!r}: {error.strerror or error}") from error

    def _take_lock(self, kind: int, deadline: Deadline) -> None:
        for _ in deadline.tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
            if self._has_locked(kind):
                return
        raise StoreTimeoutError(
            f"FileStore {self.path!r}: timeout after {deadline.milliseconds}ms, others lock it"
        )

    def _has_locked(self, kind: int) -> bool:
        """Lock the file at the path, unless it is locked; the first step makes the file."""
        if self._descriptor < 0:
            flags = os.O_RDWR | os.O_CLOEXEC | (0 if self._opened else os.O_CREAT)
            self._descriptor = os.open(self.path, flags, 0o644)
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if os.fstat(self._descriptor).st_nlink:
            self._opened = True
            return True
        # Removed while this waited for the lock. A process that never had it open may make another.
        if self._opened:
            raise StoreError(
                f"FileStore {self.path!r} was removed or replaced while in use: "
                "was it cleaned up, or is world_size too small?"
            )
        self.close()
        return False

    def _catch_up(self, kind: int) -> None:
        size = os.fstat(self._descriptor).st_size
        data = os.pread(self._descriptor, size - self._position, self._position)
        if self._position == 0:
            try:
                check_beginning(data)
            except StoreError as error:
                raise StoreError(f"FileStore {self.path!r}: {error}") from None
        self._position += replay(data, self.values)
        if kind == fcntl.LOCK_EX and self._position < size:
            # A writer died in the middle of a record. The rest of it must not swallow the next one.
            os.ftruncate(self._descriptor, self._position)
