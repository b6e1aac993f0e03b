"""`FileStore`: keys in a file that all ranks can open; the format is torch's, so both can share one.

The file is a log of records, in the format of torch 2.13, found by reading files that torch wrote: a record
is a key and a value, each a length (uint32, little-endian) and its bytes. The last record of a key is valid.
Users' keys begin with ``/``; a record with a key of ``-/…`` deletes the key behind the ``-``.

Theory of operation: a step of the store takes the file's lock (shared to read, exclusive to write), replays
the records that others have appended since its last step, and appends its own with one write. So a reader
without a lock, or a crash, sees whole records and at most one unfinished end, which the next writer
truncates. The file may be removed, or replaced by a new one, while a process waits for the lock: the link
count tells.

Signal handlers run wherever a function begins or has returned, also inside a step. If one raises, the lock is
released, and the next step replays the records whose replay was cut off: `_position` moves last. If one uses
the store, it releases the lock of the step that it interrupted, which then starts again (`_turn` tells).
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from dist2.errors import InvalidUsageError, StoreError, StoreTimeoutError
from dist2.runtime.deadline import Deadline
from dist2.store import lifetime
from dist2.store.base import DEFAULT_TIMEOUT, Store, wait_timed_out
from dist2.store.table import counted
from dist2.store.text import as_name

_T = TypeVar("_T")

_LOCK_PAUSES_S = 0.0002, 0.005
"""The shortest and the longest pause while others lock the file, in seconds."""
_KEY_PAUSES_S = 0.0005, 0.02
"""The same while keys are not set."""
_LEAVE_S = 5.0
"""How long leaving may wait for the file's lock."""

# The format of the file

_LENGTH = struct.Struct("<I")

REFERENCES = b"refcount/"
"""How many stores have the file open. The first record of every file has this key."""

FINISHED = b"cleanup/"
"""How many stores have had it open and closed it."""

SPACE = b"/"
_DELETED = b"-"

_FIRST = _LENGTH.pack(len(REFERENCES)) + REFERENCES


def encode_record(key: bytes, value: bytes) -> bytes:
    """Return the bytes of a record."""
    return _LENGTH.pack(len(key)) + key + _LENGTH.pack(len(value)) + value


def encode_deletion(key: bytes) -> bytes:
    """Return the bytes of a record that deletes a key."""
    return encode_record(_DELETED + key, b"")


def check_beginning(data: bytes) -> None:
    """Refuse a file that no FileStore wrote.

    Raises:
        StoreError: Its beginning shows it.
    """
    if data[: len(_FIRST)] != _FIRST[: len(data)]:
        raise StoreError(f"it is not a FileStore's: it begins with {data[: len(_FIRST)]!r}")


def replay(data: bytes, values: dict[bytes, bytes]) -> int:
    """Apply the whole records at the beginning of ``data``; return how many bytes they take."""
    at = 0
    while True:
        key_end = _string_end(data, at)
        value_end = _string_end(data, key_end) if key_end is not None else None
        if key_end is None or value_end is None:
            return at
        key = data[at + _LENGTH.size : key_end]
        if key.startswith(_DELETED + SPACE):
            values.pop(key[len(_DELETED) :], None)
        else:
            values[key] = data[key_end + _LENGTH.size : value_end]
        at = value_end


def _string_end(data: bytes, at: int) -> int | None:
    """Return where a string ends; None where the data ends earlier."""
    if len(data) - at < _LENGTH.size:
        return None
    end: int = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    return end if end <= len(data) else None


# The file as a log with many writers


Records = bytes
"""Records that a step adds, encoded one after the other."""


class _Steps(threading.local):
    """The steps that a thread runs: a garbage collection in one must not wait for its lock.

    Attributes:
        under_way: How many.
    """

    under_way = 0


_steps = _Steps()


class SharedLog:
    """The keys of a file that several processes change.

    A step given to `read` or `update` runs under the file's lock, with `values` up to date. It changes
    nothing, and may run twice.

    Attributes:
        path: The file, as given.
        values: The values of all keys, the store's own included.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.values: dict[bytes, bytes] = {}
        self._position = 0
        self._size = 0
        # Stays open: the kernel cannot reuse its inode number, so a replaced file is recognised.
        self._descriptor = -1
        self._opened = False
        self._lock = threading.RLock()
        self._turn = 0

    def read(self, step: Callable[[], _T], deadline: Deadline) -> _T:
        """Run a step that only reads, and return its result; others may read at the same time.

        Raises:
            StoreError: The file was removed or replaced, or cannot be read.
            StoreTimeoutError: Other processes kept it locked.
        """
        return self._locked(fcntl.LOCK_SH, lambda: (b"", step()), deadline)

    def update(self, step: Callable[[], tuple[Records, _T]], deadline: Deadline) -> _T:
        """Run a step alone, add its records, and return its result. The first one makes the file.

        Raises:
            StoreError: The file was removed or replaced, or cannot be written.
            StoreTimeoutError: Others kept it locked.
        """
        return self._locked(fcntl.LOCK_EX, step, deadline)

    def increased(self, key: bytes, amount: int) -> tuple[Records, int]:
        """In an `update`: return the record of a counter after an addition, and its new value.

        Raises:
            InvalidUsageError: The key holds no integer, or the sum does not fit 64 bits.
        """
        total = counted(key.removeprefix(SPACE), self.values.get(key, b"0"), amount)
        return encode_record(key, b"%d" % total), total

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

    def _locked(self, kind: int, step: Callable[[], tuple[Records, _T]], deadline: Deadline) -> _T:
        with self._lock:
            outer = _steps.under_way
            try:
                _steps.under_way = outer + 1
                return self._run(kind, step, deadline)
            except StoreError:  # a timeout is an OSError as well
                raise
            except OSError as error:
                if error.errno is None:  # a signal handler's own
                    raise
                raise StoreError(f"FileStore {self.path!r}: {error.strerror or error}") from error
            finally:
                _steps.under_way = outer  # first: no signal handler can run before it
                # Covers the lock's acquisition as well: a handler may raise as soon as it is taken.
                if self._descriptor >= 0:
                    with suppress(OSError):  # where there are no locks, which `_has_locked` has said
                        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _run(self, kind: int, step: Callable[[], tuple[Records, _T]], deadline: Deadline) -> _T:
        while True:
            self._turn += 1
            turn = self._turn
            self._take_lock(kind, deadline)
            self._catch_up(kind, turn)
            records, result = step()
            # No signal handler runs between this comparison and the write.
            if self._turn == turn:
                if records:
                    # One write, so that a reader without locks, or a crash, sees all or an unfinished end.
                    written = os.pwrite(self._descriptor, records, self._position)
                    self._size = self._position + written
                    if written != len(records):
                        self._catch_up(kind, turn)  # truncates the file
                        raise StoreError(
                            f"FileStore {self.path!r}: wrote {written} of {len(records)} bytes; "
                            "is the disk full?"
                        )
                return result  # the next step replays the records

    def _take_lock(self, kind: int, deadline: Deadline) -> None:
        for _ in deadline.tries(*_LOCK_PAUSES_S):
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
        except OSError as error:
            if error.errno is None:  # a signal handler's own
                raise
            raise StoreError(
                f"FileStore {self.path!r} cannot be locked: {error.strerror}: its file system has no flock "
                "(such as Lustre without the mount option), or a seccomp profile forbids it; use a file on "
                "another file system, or tcp://"
            ) from error
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

    def _catch_up(self, kind: int, turn: int) -> None:
        position = self._position
        known = self._size  # read first: a signal handler may append meanwhile
        size = os.fstat(self._descriptor).st_size
        if size < known:
            raise StoreError(
                f"FileStore {self.path!r} was truncated while in use, from {known} to {size} bytes: "
                "its keys are lost; all ranks need a new file"
            )
        data = os.pread(self._descriptor, size - position, position)
        if position == 0:
            try:
                check_beginning(data)
            except StoreError as error:
                raise StoreError(f"FileStore {self.path!r}: {error}") from None
        end = position + replay(data, self.values)
        if kind == fcntl.LOCK_EX and end < size and self._turn == turn:
            # A writer died in the middle of a record. The rest of it must not swallow the next one.
            os.ftruncate(self._descriptor, end)
        self._position = self._size = end


# The store


class FileStore(Store):
    """A store in a file on a file system that all ranks share and that has ``flock``.

    The last of ``world_size`` users to close it removes the file; with a negative ``world_size`` it stays.

    Args:
        file_name: The file; made if it is not there.
        world_size: How many users there will be; negative if that is not known.
        timeout: Limit of each call.

    Attributes:
        path: The file.

    Raises:
        StoreError: The file cannot be opened, or is not a FileStore's.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = dist2.FileStore(f"{folder}/store", 1)
        ...     print(store.add("counter", 2))
        ...     store.close()
        2
    """

    # A forked child did not count itself in, so it must not count itself out.
    _counted_in_process = -1

    def __init__(
        self, file_name: str, world_size: int = -1, timeout: timedelta | float = DEFAULT_TIMEOUT
    ) -> None:
        super().__init__(timeout)
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise InvalidUsageError(f"world_size must be an int, got {world_size!r}")
        if not isinstance(file_name, (str, os.PathLike)) or not os.fspath(file_name):
            raise InvalidUsageError(f"file_name must be a non-empty path, got {file_name!r}")
        self._world_size = world_size
        log = SharedLog(file_name)
        try:
            log.update(lambda: log.increased(REFERENCES, 1), self._deadline())
        except BaseException:
            log.close()
            raise
        self._log = log
        self._counted_in_process = os.getpid()
        lifetime.track_user(self)

    @property
    def path(self) -> str:
        """The file's name, as given."""
        return self._log.path

    def has_extended_api(self) -> bool:
        """Return False, as torch's does."""
        return False

    def clone(self) -> FileStore:
        """Return another store over the same file, with a separate timeout."""
        return FileStore(self.path, self._world_size, self.timeout)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's descriptor; the store opens the file anew."""
        self._log.abandon()

    def _can_end(self) -> bool:
        return not _steps.under_way  # which keep a file locked, perhaps this one

    def _release(self) -> None:
        if self._counted_in_process < 0:
            return
        try:
            if self._counted_in_process == os.getpid() and not self._log.is_gone():
                self._log.update(self._count_out, Deadline.after(_LEAVE_S))
        finally:
            self._log.close()

    def _count_out(self) -> tuple[Records, None]:
        finish, finished = self._log.increased(FINISHED, 1)
        leave, references = self._log.increased(REFERENCES, -1)
        if references == 0 and 0 <= self._world_size <= finished:
            self._log.remove()
        return finish + leave, None

    def _set(self, key: bytes, value: bytes) -> None:
        self._require_open()
        self._log.update(lambda: (encode_record(SPACE + key, value), None), self._deadline())

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        found = self._poll((key,), deadline)
        if found is None:
            name = as_name(key)
            raise StoreTimeoutError(f"Timeout waiting for key: {name} after {deadline.milliseconds} ms")
        return found[0]

    def _add(self, key: bytes, amount: int) -> int:
        self._require_open()
        return self._log.update(lambda: self._log.increased(SPACE + key, amount), self._deadline())

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        def step() -> tuple[Records, bytes]:
            held = self._log.values.get(SPACE + key)
            if held is None and expected:
                return b"", expected  # as torch does, see `Table.compare_set`
            if held is not None and held != expected:
                return b"", held
            return encode_record(SPACE + key, desired), desired

        self._require_open()
        return self._log.update(step, self._deadline())

    def _append(self, key: bytes, value: bytes) -> None:
        def step() -> tuple[Records, None]:
            return encode_record(SPACE + key, self._log.values.get(SPACE + key, b"") + value), None

        self._require_open()
        self._log.update(step, self._deadline())

    def _delete(self, key: bytes) -> bool:
        def step() -> tuple[Records, bool]:
            there = SPACE + key in self._log.values
            return encode_deletion(SPACE + key) if there else b"", there

        self._require_open()
        return self._log.update(step, self._deadline())

    def _num_keys(self) -> int:
        self._require_open()
        return self._log.read(lambda: len(self._log.values), self._deadline())

    def _list_keys(self) -> list[bytes]:
        def step() -> list[bytes]:
            return [key[len(SPACE) :] for key in self._log.values if key.startswith(SPACE)]

        self._require_open()
        return self._log.read(step, self._deadline())

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        return self._look(keys, self._deadline()) is not None

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        if self._poll(keys, deadline) is None:
            raise wait_timed_out(keys, deadline)

    def _poll(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes] | None:
        """Return the values of keys as soon as all have one; None when the deadline has passed."""
        for _ in deadline.tries(*_KEY_PAUSES_S):
            found = self._look(keys, deadline.stretched())
            if found is not None:
                return found
        return None

    def _look(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes] | None:
        def step() -> list[bytes] | None:
            values = [self._log.values.get(SPACE + key) for key in keys]
            found = [value for value in values if value is not None]
            return found if len(found) == len(values) else None

        self._require_open()
        return self._log.read(step, deadline)
