"""`FileStore`: keys in a file that all ranks can open; the format is torch's, so both can share one."""

from __future__ import annotations

import os
from datetime import timedelta

from dist2.errors import InvalidUsageError, StoreTimeoutError
from dist2.runtime.deadline import Deadline
from dist2.store import lifetime
from dist2.store.base import DEFAULT_TIMEOUT, Store, wait_timed_out
from dist2.store.file_format import FINISHED, REFERENCES, SPACE, encode_deletion
from dist2.store.shared_log import SharedLog
from dist2.store.text import as_name

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02

_LEAVE_S = 5.0
"""How long leaving may wait for the file's lock."""


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
            log.update(lambda: log.increase(REFERENCES, 1), self._deadline())
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

    def _release(self) -> None:
        if self._counted_in_process < 0:
            return
        try:
            if self._counted_in_process == os.getpid() and not self._log.is_gone():
                self._log.update(self._count_out, Deadline.after(_LEAVE_S))
        finally:
            self._log.close()

    def _count_out(self) -> None:
        finished = self._log.increase(FINISHED, 1)
        references = self._log.increase(REFERENCES, -1)
        if references == 0 and 0 <= self._world_size <= finished:
            self._log.remove()

    def _set(self, key: bytes, value: bytes) -> None:
        self._require_open()
        self._log.update(lambda: self._log.write(SPACE + key, value), self._deadline())

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        found = self._poll((key,), deadline)
        if found is None:
            name = as_name(key)
            raise StoreTimeoutError(f"Timeout waiting for key: {name} after {deadline.milliseconds} ms")
        return found[0]

    def _add(self, key: bytes, amount: int) -> int:
        self._require_open()
        return self._log.update(lambda: self._log.increase(SPACE + key, amount), self._deadline())

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        def step() -> bytes:
            held = self._log.values.get(SPACE + key)
            if held is None and expected:
                return expected  # as torch does, see `Table.compare_set`
            if held is not None and held != expected:
                return held
            self._log.write(SPACE + key, desired)
            return desired

        self._require_open()
        return self._log.update(step, self._deadline())

    def _append(self, key: bytes, value: bytes) -> None:
        def step() -> None:
            self._log.write(SPACE + key, self._log.values.get(SPACE + key, b"") + value)

        self._require_open()
        self._log.update(step, self._deadline())

    def _delete(self, key: bytes) -> bool:
        def step() -> bool:
            there = SPACE + key in self._log.values
            if there:
                self._log.write_record(encode_deletion(SPACE + key))
            return there

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
        for _ in deadline.tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
            found = self._look(keys, self._deadline())
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
