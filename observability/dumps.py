"""When the flight recorder is written to files by itself: a group broke, a signal arrived, or in periods.

A failure that leaves a group of no use writes the dump of its rank in the thread that failed, before the
error is raised: the process may end with it. A signal wakes a thread that writes, as a handler must not
take locks that the interrupted frame may hold. Python runs handlers in the main thread between two of its
instructions: while that thread is inside of an operation of dist2 this takes milliseconds, inside of
another library as long as that takes. ``POST /handler/fr_trace_json`` and ``GET /flight_recorder`` of the
control plane need no main thread.

This module is the entry point of the recorder in every process, so that the settings of the environment are
heeded: ``DIST2_DUMP``, and those of `observability.automatic`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.operation.record import Operation
from dist2.runtime.config import Config
from dist2.runtime.deadline import seconds
from observability import automatic
from observability.flight_recorder import FlightRecorder, Format, encode, global_rank, instrument, write_whole

log = logging.getLogger("dist2.dumps")


def dump_on(
    path: str | Path,
    *,
    failure: bool = True,
    signal_number: int | None = None,
    every_s: float | None = None,
    recorder: FlightRecorder = instrument,
    format: Format = "pickle",
) -> Callable[[], None]:
    """Write the flight recorder when a group breaks, when a signal arrives, and periodically.

    ``DIST2_DUMP``, ``DIST2_DUMP_SIGNAL`` and ``DIST2_DUMP_EVERY`` do the same without a change of the
    program. Later dumps of a rank replace earlier ones.

    Args:
        path: The file, as in `dump_flight_recorder`: ``dumps/flight_{rank}``.
        failure: Whether to write when an operation fails and leaves its group of no use.
        signal_number: Which signal: ``signal.SIGUSR2``. The handler before it is called as well.
        every_s: Write again and again, with pauses of so many seconds: a process that is killed leaves its
            last dump. A dump of a full recorder takes 0.1 s of CPU.
        recorder: Remembers.
        format: ``"pickle"``, or ``"json"``.

    Returns:
        A callable that undoes it.

    Raises:
        InvalidUsageError: The path is none, ``every_s`` is not positive, or handlers cannot be set here:
            this is not the main thread.

    Examples:
        >>> undo = observability.dump_on(tempfile.mkdtemp() + "/flight_{rank}")
        >>> undo()
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentTypeError(f"path must be a str or a Path, got {path!r} ({type(path).__name__})")
    if every_s is not None:
        every_s = seconds(every_s, "every_s")
    writer = _Writer(str(path), recorder, format)
    undo: list[Callable[[], object]] = []
    if signal_number is not None:
        undo.append(_on_signal(signal_number, lambda: writer.all_ranks("a signal asked for it")))
    if every_s is not None:
        undo.append(_each(every_s, lambda: writer.all_ranks("it is time", logging.DEBUG)))
    if failure:
        recorder.on_broken.append(writer.broken)
        undo.append(lambda: recorder.on_broken.remove(writer.broken))

    def undone() -> None:
        while undo:
            undo.pop()()

    return undone


class _Writer:
    """Writes dumps to one path."""

    def __init__(self, path: str, recorder: FlightRecorder, format: Format) -> None:
        self._path = path
        self._recorder = recorder
        self._format = format

    def broken(self, operation: Operation) -> None:
        """Write that of the rank whose operation failed."""
        self._write(global_rank(operation.signature.group), f"{operation.describe()} failed")

    def all_ranks(self, why: str, level: int = logging.WARNING) -> None:
        """Write that of each rank of this process."""
        for rank in self._recorder.ranks() or (None,):
            self._write(rank, why, level)

    def _write(self, rank: int | None, why: str, level: int = logging.WARNING) -> None:
        try:
            recording = self._recorder.recording(rank)
            where = write_whole(self._path, recording.rank, encode(recording, self._format))
        except Exception:
            log.exception("the flight recorder cannot be written to %s", self._path)
        else:
            fields = {"rank": recording.rank, "path": str(where)}
            log.log(level, "wrote the flight recorder to %s: %s", where, why, extra=fields)


def _each(every_s: float, act: Callable[[], None]) -> Callable[[], object]:
    """Have a thread act periodically; return a callable that ends it."""
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(every_s):
            act()

    thread = threading.Thread(target=run, name="dist2-dumps", daemon=True)
    thread.start()

    def undo() -> None:
        ends.set()
        thread.join(5)

    return undo


def _on_signal(number: int, act: Callable[[], None]) -> Callable[[], object]:
    """Have a thread act on each signal; return a callable that undoes that."""
    came: SimpleQueue[bool] = SimpleQueue()  # its put may interrupt a put

    def wait() -> None:
        while came.get():
            act()

    before: Any = signal.getsignal(number)

    def handle(received: int, frame: FrameType | None) -> None:
        came.put(True)
        if callable(before):
            before(received, frame)

    try:
        signal.signal(number, handle)
    except (ValueError, OSError) as error:
        raise InvalidUsageError(f"signal_number={number!r} cannot be handled here: {error}") from error
    thread = threading.Thread(target=wait, name="dist2-dumps", daemon=True)
    thread.start()

    def undo() -> None:
        if signal.getsignal(number) is handle:
            signal.signal(number, before)
        came.put(False)
        thread.join(5)

    return undo


def from_settings(dump: str | None, signal_name: str | None, every_s: float | None = None) -> None:
    """Apply the settings of the environment.

    Args:
        dump: ``DIST2_DUMP``.
        signal_name: ``DIST2_DUMP_SIGNAL``.
        every_s: ``DIST2_DUMP_EVERY``.
    """
    if dump is None:
        for name, value in (("SIGNAL", signal_name), ("EVERY", every_s)):
            if value is not None:
                log.warning("DIST2_DUMP_%s=%s has no effect without DIST2_DUMP", name, value)
        return
    number = None if signal_name is None else signal.Signals[f"SIG{signal_name}"]
    try:
        dump_on(dump, signal_number=number, every_s=every_s)
    except InvalidUsageError as error:  # the first group was made in another thread
        log.warning("%s; DIST2_DUMP still works for failures", error)
        dump_on(dump, every_s=every_s)


_settings = Config.from_environment()
from_settings(_settings.dump, _settings.dump_signal, _settings.dump_every_s)
automatic.from_settings(_settings)
