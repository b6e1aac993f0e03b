"""The log of all operations of a process, in rotating files: ``DIST2_OPERATION_LOG``; off by default.

Theory of operation. An operation that ends appends its record to a queue, by a method in C. A thread writes
the queue to files once a second, or sooner if the queue fills. It spends at most `SHARE` of its time on that,
which bounds the cost to a loop of nothing but operations. Of more than `MOST` operations in the queue, the
oldest are dropped; a row in the files, and a warning, have their number. A disk may hang: so each time the
queue is written by another thread, which is not waited for where that takes long, neither to drop operations
nor at the end of the process.

A process writes *segments* of two files: ``.calls.csv`` has a row for each distinct call (rank, group,
operation, sizes), ``.operations.csv`` one of about 34 bytes for each operation, which refers to that. New
segments replace old ones, so each has all calls that it refers to. A row of operations without a call counts
lost ones. `observability.operation_files` reads a folder with DuckDB; a last row that a killed process has
cut off lacks columns, and is skipped.
"""

from __future__ import annotations

import csv
import errno
import io
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from observability.flight_recorder import error_text, global_rank
from observability.job.rank_text import rank_text
from observability.operation_files import CALLS, OPERATIONS

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup

MOST = 1 << 16
"""Operations in the queue that are kept."""
SEGMENTS = 8
"""Segments that a process keeps."""
LOOK_S = 1.0
LEAST_LOOK_S = 0.02
FLUSH_S = 5.0
"""How long the end of a process waits for a disk."""
SHARE = 0.2
CHUNK = 256
"""Operations that are written at a time: between two chunks, other threads get the interpreter."""
ERROR_CHARS = 500

log = logging.getLogger("dist2.operation_log")


class Segments:
    """The files of one process.

    Args:
        folder: Where they are written.
        most_bytes: Size of all of them.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        host = re.sub(r"[^\w.-]+", "-", socket.gethostname())
        self._stem = f"{host}-{os.getpid()}-{time.time_ns() // 1_000_000}"
        self._folder = folder
        self._segment_bytes = most_bytes // SEGMENTS
        self._number = 0
        self._size = 0
        self._calls: dict[Signature, int] = {}
        self._files: tuple[BinaryIO, BinaryIO] | None = None

    def write(self, operations: list[Operation]) -> None:
        """Append operations.

        Raises:
            OSError: They cannot be written.
        """
        if self._files is None or self._size > self._segment_bytes:
            self._next()
        offset_ns, known = time.time_ns() - time.monotonic_ns(), self._calls
        fresh = [each for each in dict.fromkeys(op.signature for op in operations) if each not in known]
        calls = known | {each: len(known) + index for index, each in enumerate(fresh)} if fresh else known
        rows = [_row(operation, calls[operation.signature], offset_ns) for operation in operations]
        self._append("".join(_call_row(calls[each], each) for each in fresh), "".join(rows))
        self._calls = calls  # which are in the file by now

    def lost(self, count: int) -> None:
        """Append a row that counts lost operations.

        Raises:
            OSError: It cannot be written.
        """
        if self._files is None:
            self._next()
        self._append("", f",{count},{time.time_ns() // 1000},,,\n")

    def close(self) -> None:
        """Close the files."""
        for file in self._files or ():
            file.close()
        self._files = None

    def _append(self, calls: str, operations: str) -> None:
        """Append text to both files, or to none, as rows follow a part of one, and their calls come again."""
        assert self._files is not None  # `_next` came before
        sizes = [os.fstat(file.fileno()).st_size for file in self._files]
        try:
            for file, text in zip(self._files, (calls, operations), strict=True):  # no row before its call
                data = text.encode(errors="replace")
                if data and file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
                self._size += len(data)
        except OSError:
            for file, size in zip(self._files, sizes, strict=True):
                file.truncate(size)
            self._size = sum(sizes)
            raise

    def _next(self) -> None:
        """Begin a segment; remove the oldest one."""
        self.close()
        calls, operations = self._paths(self._number + 1)
        self._files = calls.open("ab", buffering=0), operations.open("ab", buffering=0)
        self._number, self._size, self._calls = self._number + 1, 0, {}
        for path in self._paths(self._number - SEGMENTS):
            path.unlink(missing_ok=True)

    def _paths(self, number: int) -> tuple[Path, Path]:
        name = f"{self._stem}-{number:06d}"
        return self._folder / f"{name}{CALLS}", self._folder / f"{name}{OPERATIONS}"


class OperationLog:
    """An instrument that logs operations that ended.

    Args:
        folder: Where the files are written; made if there is none.
        most_bytes: Size of the files of a process.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder.absolute()  # the program may change its folder
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._most_bytes = most_bytes
        self._ended: deque[Operation] = deque()
        self._owner = 0
        self._fails = False
        self._untold = 0  # lost operations that no file counts yet
        self.lost = 0
        # In place of the methods below, without a frame of Python: they are called in every operation.
        self.operation_started = id  # type: ignore[method-assign, assignment]  # in place of the method
        self.operation_finished = self._ended.append  # type: ignore[method-assign, assignment]  # likewise

    def group_opened(self, group: ProcessGroup) -> None:
        """Start the thread with the first group of a process: a forked child has none."""
        if self._owner == os.getpid():
            return
        self._owner = os.getpid()
        self._ended.clear()
        self._segments = Segments(self._folder, self._most_bytes)
        self._writing, self._dropping = threading.Lock(), threading.Lock()
        self._dropped, self._took_s = 0, 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dist2-operation-log", daemon=True)
        self._thread.start()

    def group_closed(self, group: ProcessGroup) -> None:
        """Do nothing: its operations are in the queue, or written."""

    def operation_started(self, operation: Operation) -> None:
        """Do nothing: operations are logged once they have ended."""

    def operation_finished(self, operation: Operation) -> None:
        """Queue an operation."""
        self._ended.append(operation)

    def flush(self) -> None:
        """Write the operations that have ended so far, if that takes no longer than `FLUSH_S`."""
        if self._owner == os.getpid():
            self._started(self._write).join(FLUSH_S)

    def close(self) -> None:
        """Write what is left, and end the thread. Idempotent."""
        if self._owner != os.getpid():
            return
        self._ends.set()
        self._thread.join(LOOK_S)
        self._started(self._write_the_rest).join(FLUSH_S)
        self._owner = 0

    def _run(self) -> None:
        pause_s = LOOK_S
        while not self._ends.wait(pause_s):
            before = len(self._ended)
            writer = self._started(self._write)
            writer.join(LOOK_S)
            while writer.is_alive() and not self._ends.is_set():
                self._drop()
                writer.join(LOOK_S)
            wanted_s = pause_s * MOST / 4 / max(1, before)  # the queue is then a quarter full
            pause_s = max(min(LOOK_S, wanted_s), LEAST_LOOK_S, self._took_s * (1 / SHARE - 1))

    def _started(self, write: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=write, name="dist2-operation-log-writer", daemon=True)
        thread.start()
        return thread

    def _write_the_rest(self) -> None:
        self._write()
        with self._writing:
            self._segments.close()

    def _write(self) -> None:
        with self._writing:
            began_s = time.thread_time()
            self._drop()
            left = len(self._ended)
            why = "more end than it may write"
            while left:
                operations = [self._ended.popleft() for _ in range(min(CHUNK, left))]
                left -= len(operations)
                if not self._written(operations):
                    why = "they cannot be written"
                    with self._dropping:
                        self._dropped += len(operations)
            with self._dropping:
                dropped, self._dropped = self._dropped, 0
            if dropped or self._untold:
                self._tell(dropped, why)
            self._took_s = time.thread_time() - began_s

    def _drop(self) -> None:
        """Drop the oldest operations beyond `MOST`: those that a thread is about to write are fewer."""
        with self._dropping:
            for _ in range(len(self._ended) - MOST):
                self._ended.popleft()
                self._dropped += 1

    def _written(self, operations: list[Operation]) -> bool:
        """Write some operations; return whether they could be written."""
        failed, self._fails = self._fails, False
        try:
            self._segments.write(operations)
        except OSError as error:
            self._fails = True
            if not failed:  # else it has been said
                log.warning("operations cannot be logged in %s: %s", self._folder, error)
            return False
        return True

    def _tell(self, dropped: int, why: str) -> None:
        """Say in the files and in the log that operations are lost."""
        first, self.lost = not self.lost, self.lost + dropped
        self._untold += dropped
        with suppress(OSError):  # then once a file can be written again
            self._segments.lost(self._untold)
            self._untold = 0
        if first:
            log.warning(
                "the operation log of process %d has lost %d operations: %s; "
                "its files count further ones (dist2 query FOLDER: table events)",
                *(os.getpid(), dropped, why),
            )


def _row(operation: Operation, call: int, offset_ns: int) -> str:
    created_ns, finished_ns = operation.created_ns, operation.finished_ns
    queued_ns = max(0, (operation.started_ns or finished_ns) - created_ns)
    error = "" if operation.error is None else _quoted(error_text(operation)[:ERROR_CHARS])
    called_us = (created_ns + offset_ns) // 1000
    return f"{call},{operation.seq},{called_us},{queued_ns},{finished_ns - created_ns},{error}\n"


def _call_row(call: int, signature: Signature) -> str:
    group, row = signature.group, io.StringIO()
    values: tuple[Any, ...] = (
        *(call, global_rank(group), socket.gethostname(), os.getpid()),
        *(group.uid, group.name, group.rank, rank_text(group.global_ranks)),
        *(signature.kind.value, str(signature), signature.nbytes),
    )
    csv.writer(row, lineterminator="\n").writerow(values)
    return row.getvalue()


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""').replace("\n", " ") + '"'
