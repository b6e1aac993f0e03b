"""The flight recorder: the last operations of this process, always on, written out when something is wrong.

Recording is one append to a ring in C; records are the `Operation` objects themselves, which hold no tensors.
Of each group the last ones are kept, however busy other groups are. `dump_flight_recorder` writes the format
that PyTorch's analyser ``torchfrtrace`` reads, so that the dumps of all ranks together name the rank that
fell behind or called something else.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, NamedTuple

import attrs

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.operation.counters import Tally, Tallying
from dist2.operation.kinds import OpKind
from dist2.operation.record import FIELDS, Operation, State
from dist2.operation.ring import Ring
from dist2.operation.runner import LIBRARY_PATHS
from dist2.operation.signature import GroupInfo, Signature
from dist2.runtime.config import DEFAULT_RECORDER_SIZE, Config
from observability.frames import frames_of_threads

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup

Channel = tuple[GroupInfo, int, int, int]
"""One direction between two ranks of a group: the group, source, destination, tag."""

CLOSED_GROUPS = 64
"""Closed groups whose messages stay counted, as other ranks may still have the group open."""

KEPT = 64
"""Operations of a group that are kept when others displace them."""

Format = Literal["pickle", "json"]


MAX_SIGNATURES = 4096
"""How many signatures of messages it is known of where to count them."""

MOST_FRAMES = 8
"""Calls in user code that a dump has of an operation."""

_LIBRARY = (*LIBRARY_PATHS, str(Path(__file__).parent))

_MESSAGES = (OpKind.SEND, OpKind.RECV)


class Frame(NamedTuple):
    """A call in user code: the function, the file, the line."""

    name: str
    filename: str
    line: int


def user_frames(frame: FrameType | None) -> tuple[Frame, ...]:
    """Return the calls in user code that lead to a frame, the innermost first, `MOST_FRAMES` at most."""
    found: list[Frame] = []
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARY):
            found.append(Frame(code.co_qualname, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(found)


def frames_in_flight(operations: Iterable[Operation]) -> dict[Operation, tuple[Frame, ...]]:
    """Return the calls in user code that lead to operations whose caller is inside of them now.

    A record has the innermost call only, as it costs time to look for more. But a thread that waits in an
    operation still has them all.
    """
    waiting = [each for each in operations if not each.finished_ns and each.code is not None]
    found: dict[Operation, tuple[Frame, ...]] = {}
    if not waiting:
        return found
    with frames_of_threads() as frames:
        for thread in frames:
            frame: FrameType | None = frames[thread]
            while frame is not None:
                for operation in waiting:
                    if frame.f_code is operation.code and frame.f_lasti == operation.instruction:
                        found[operation] = user_frames(frame)
                frame = frame.f_back
    return found


class RecordedError(Exception):
    """The error of an operation, without the traceback, which would keep its tensors alive.

    Attributes:
        type_name: Name of the original exception's type.
        frames: In which user code the operation was when it failed, the innermost first.
    """

    def __init__(self, error: BaseException, frames: tuple[Frame, ...] = ()) -> None:
        super().__init__(str(error))
        self.type_name = type(error).__name__
        self.frames = frames


def error_text(operation: Operation) -> str:
    """Return the error of an operation as ``Type: message``; empty if it did not fail."""
    error = operation.error
    if error is None:
        return ""
    name = error.type_name if isinstance(error, RecordedError) else type(error).__name__
    return f"{name}: {error}"


@attrs.frozen(eq=False)
class Recording:
    """The records of one rank, read at one moment.

    Attributes:
        rank: The rank in the job.
        operations: In the order of their calls.
        groups: The groups that are open or have operations above, in the order they are known.
        since_ns: Monotonic nanosecond of the earliest call since which no operation is missing; 0 if it goes
            back to the first operation of the process.
        delivered: Messages that were sent or received since the start, by channel.
        epoch_offset_ns: Nanoseconds since 1970 of the zero of the monotonic clock.
        taken_ns: Monotonic nanosecond of that moment.
        frames: The calls in user code that lead to an operation, the innermost first, where more than that
            one are known: of those that their caller is inside of.
    """

    rank: int
    operations: tuple[Operation, ...]
    groups: tuple[GroupInfo, ...]
    since_ns: int
    delivered: Mapping[Channel, int]
    epoch_offset_ns: int
    taken_ns: int
    frames: Mapping[Operation, tuple[Frame, ...]] = attrs.field(factory=dict)

    @property
    def complete(self) -> bool:
        """Whether it goes back to the first operation of the process."""
        return not self.since_ns


def global_rank(info: GroupInfo) -> int:
    """Return the caller's rank in the job."""
    return info.global_ranks[info.rank]


class FlightRecorder:
    """An instrument that keeps the operations begun last.

    Args:
        capacity: How many operations are kept; besides these, of each group the last `KEPT` that later ones
            have displaced.

    Attributes:
        on_opened: Called with each group of this process once it is open; its errors are not caught.
        on_broken: Called with an operation whose failure has left its group of no use.

    Examples:
        >>> recorder = observability.FlightRecorder(100)
        >>> remove = dist2.add_instrument(recorder)
        >>> pg.barrier()
        >>> len(recorder.operations()) > 0
        True
        >>> remove()
    """

    def __init__(self, capacity: int = DEFAULT_RECORDER_SIZE) -> None:
        if capacity < 1:
            raise InvalidUsageError(f"capacity must be at least 1, got {capacity}")
        self._ring: Ring = Ring(capacity, KEPT)
        self._groups: dict[GroupInfo, None] = {}
        self._closed: deque[GroupInfo] = deque()
        self._delivered: dict[Channel, Tally] = {}
        self._by_signature: dict[Signature, Tally] = {}
        self._lock = threading.Lock()
        self.on_opened: list[Callable[[ProcessGroup], None]] = []
        self.on_broken: list[Callable[[Operation], None]] = []
        # The method below without a Python frame: it is called before every operation.
        self.operation_started = self._ring  # type: ignore[method-assign]  # in place of the method
        # And this one in C, which leaves failures and first messages to it.
        self.operation_finished = Tallying(  # type: ignore[method-assign]  # in place of the method
            _MESSAGES, self._by_signature, self.operation_finished
        )

    # Instrument

    def group_opened(self, group: ProcessGroup) -> None:
        """Take up a group. Idempotent."""
        with self._lock:
            is_new = group.info not in self._groups
            self._groups[group.info] = None
            self._ring.watch(group.info)
        for tell in tuple(self.on_opened) if is_new else ():
            tell(group)

    def group_closed(self, group: ProcessGroup) -> None:
        """Forget a group, except its operations in the ring; its counts of messages are forgotten later."""
        with self._lock:
            self._groups.pop(group.info, None)
            self._by_signature.clear()  # it would keep the signatures of the group alive
            self._closed.append(group.info)
            if len(self._closed) > CLOSED_GROUPS:
                forgotten = self._closed.popleft()
                self._ring.forget(forgotten)
                for channel in [channel for channel in self._delivered if channel[0] is forgotten]:
                    del self._delivered[channel]

    def operation_started(self, operation: Operation) -> None:
        """Record an operation."""
        self._ring(operation)

    def operation_finished(self, operation: Operation) -> None:
        """Count a message; let go of an exception. A successful collective costs two comparisons."""
        if operation.error is not None:
            self._replace(operation, operation.error)
            if self.on_broken and not getattr(operation.error, "group_usable", False):
                for tell in tuple(self.on_broken):
                    tell(operation)
            return
        if operation.signature.kind in _MESSAGES:
            with self._lock:
                tally = self._by_signature.get(operation.signature) or self._tally_of(operation)
                if tally is not None:
                    tally.count += 1

    # Readings

    def operations(self) -> list[Operation]:
        """Return the records of all ranks of this process, those of a group about in the order of the calls.

        Examples:
            >>> recorder = observability.FlightRecorder(100)
            >>> remove = dist2.add_instrument(recorder)
            >>> pg.barrier()
            >>> remove()
            >>> {operation.signature.kind.value for operation in recorder.operations()}
            {'barrier'}
        """
        with self._lock:
            return self._ring.recorded()

    def recent(self) -> list[Operation]:
        """Return the records without those that others have displaced, about in the order of their calls.

        Examples:
            >>> observability.FlightRecorder(100).recent()
            []
        """
        with self._lock:
            return self._ring.recent()

    def delivered(self) -> dict[Channel, int]:
        """Return how many messages were sent or received since the start, by channel.

        Examples:
            >>> observability.FlightRecorder(100).delivered()
            {}
        """
        with self._lock:
            return {channel: tally.count for channel, tally in self._delivered.items()}

    def open_groups(self) -> list[GroupInfo]:
        """Return the groups that are open, in the order they are known.

        Examples:
            >>> recorder = observability.FlightRecorder(100)
            >>> recorder.group_opened(pg)
            >>> recorder.open_groups() == [pg.info]
            True
        """
        with self._lock:
            return list(self._groups)

    def ranks(self) -> list[int]:
        """Return the ranks of the job that this process has, or had, groups of.

        Examples:
            >>> recorder = observability.FlightRecorder(100)
            >>> recorder.group_opened(pg)
            >>> recorder.ranks() == [pg.rank()]
            True
        """
        with self._lock:
            groups = {*self._groups, *(each.signature.group for each in self._ring.recent())}
        return sorted({global_rank(info) for info in groups})

    def recording(self, rank: int | None = None) -> Recording:
        """Return the records of a rank of the job.

        Args:
            rank: The rank in the job; by default that of the first known group. Only a process with ranks as
                threads has more than one.

        Examples:
            >>> recorder = observability.FlightRecorder(100)
            >>> recorder.group_opened(pg)
            >>> recorder.recording(pg.rank()).groups == (pg.info,)
            True
        """
        taken_ns = time.monotonic_ns()
        epoch_offset_ns = time.time_ns() - taken_ns
        with self._lock:
            recorded = self._ring.recorded()
            since_ns = min(each.created_ns for each in self._ring.recent()) if self._ring.is_full else 0
            groups = {**self._groups, **dict.fromkeys(each.signature.group for each in recorded)}
            delivered = {channel: tally.count for channel, tally in self._delivered.items()}
        if rank is None:
            rank = next((global_rank(info) for info in groups), 0)
        operations = [each for each in recorded if global_rank(each.signature.group) == rank]
        # Queued operations begin later than they were called.
        operations.sort(key=lambda operation: operation.created_ns)
        return Recording(
            rank=rank,
            operations=tuple(operations),
            groups=tuple(info for info in groups if global_rank(info) == rank),
            since_ns=since_ns,
            delivered=delivered,
            epoch_offset_ns=epoch_offset_ns,
            taken_ns=taken_ns,
            frames=frames_in_flight(operations),
        )

    def dump(self, path: str | Path, *, rank: int | None = None, format: Format = "pickle") -> Path:
        """Write the records to a file; see `dump_flight_recorder`.

        Args:
            path: The file; ``{rank}`` in it stands for the rank in the job.
            rank: The rank in the job, as for `recording`.
            format: ``"pickle"``, which ``torchfrtrace`` reads, or ``"json"``.

        Examples:
            >>> recorder = observability.FlightRecorder(100)
            >>> recorder.group_opened(pg)
            >>> recorder.dump(tempfile.mkdtemp() + "/flight_{rank}").name == f"flight_{pg.rank()}"
            True
        """
        recording = self.recording(rank)
        return write_whole(path, recording.rank, encode(recording, format))

    def _tally_of(self, operation: Operation) -> Tally | None:
        """Return where to count a message; None if that is not known. Under the lock."""
        channel = channel_of(operation)
        if channel is None:
            return None
        tally = self._delivered.setdefault(channel, Tally())
        if operation.signature.peer is not None:  # else the next may be of another rank
            if len(self._by_signature) >= MAX_SIGNATURES:
                self._by_signature.clear()
            self._by_signature[operation.signature] = tally
        return tally

    def _replace(self, operation: Operation, error: BaseException) -> None:
        """Record a failed operation anew, without the frames that its exception holds."""
        copy = _without_frames(operation, error, user_frames(sys._getframe()))
        with self._lock:
            self._ring.replace(operation, copy)


def _without_frames(operation: Operation, error: BaseException, frames: tuple[Frame, ...]) -> Operation:
    copy = Operation(
        operation.signature,
        operation.seq,
        operation.created_ns,
        operation.deadline_ns,
        operation.is_async,
    )
    for name in FIELDS:
        setattr(copy, name, getattr(operation, name))
    calls = [
        each for each in frames if operation.code is not None and each.name == operation.code.co_qualname
    ]
    copy.error = RecordedError(error, frames if calls else ())  # another thread's are not its caller's
    return copy


def channel_of(operation: Operation) -> Channel | None:
    """Return the channel of a point-to-point operation; None for a receive from any that has nothing yet."""
    signature = operation.signature
    group, tag = signature.group, signature.tag
    if signature.kind is OpKind.SEND:
        return None if signature.peer is None else (group, group.rank, signature.peer, tag)
    source = signature.peer if signature.peer is not None else operation.source
    return None if source < 0 else (group, source, group.rank, tag)


def first_messages(recording: Recording) -> Counter[Channel]:
    """Return for each channel the number of its first message in the recording; the first ever is 1."""
    first: Counter[Channel] = Counter({channel: n + 1 for channel, n in recording.delivered.items()})
    for operation in recording.operations:
        if operation.signature.kind.is_p2p and (channel := channel_of(operation)) is not None:
            if channel not in first:
                first[channel] = 1
            if operation.state is State.COMPLETED:
                first[channel] -= 1
    return first


def encode(recording: Recording, format: Format = "pickle") -> bytes:
    """Return a recording in the format of ``torchfrtrace`` (pickle), or in its JSON variant.

    Raises:
        InvalidUsageError: The format is neither ``"pickle"`` nor ``"json"``.
    """
    from observability.torch_format import dump_of, json_variant

    if format == "pickle":
        return pickle.dumps(dump_of(recording), protocol=4)
    if format == "json":
        return json.dumps(json_variant(dump_of(recording))).encode()
    raise InvalidUsageError(f"format must be 'pickle' or 'json', got {format!r}")


def write_whole(path: str | Path, rank: int, data: bytes) -> Path:
    """Write a file in one step, so that no reader finds half of it; return its path.

    Its folder is made where there is none.

    Raises:
        ArgumentTypeError: It is no path.
        OSError: The folder or the file cannot be made.
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentTypeError(f"path must be a str or a Path, got {path!r} ({type(path).__name__})")
    target = Path(str(path).replace("{rank}", str(rank)))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def dump_flight_recorder(path: str | Path, *, rank: int | None = None, format: Format = "pickle") -> Path:
    """Write the last operations of this process to a file that ``torchfrtrace`` reads.

    Call it on every rank, into one folder, and run ``torchfrtrace FOLDER``: it says which rank did not
    join, or called something else. It needs no other rank to be alive, and may be called at any time.

    Args:
        path: The file; ``{rank}`` in it stands for the rank in the job. The analyser wants names that
            are a common prefix and the rank, without extension: ``dumps/flight_{rank}``. Its folder is
            made where there is none.
        rank: The rank in the job on whose behalf to write; only of use where ranks are threads.
        format: ``"pickle"``, or ``"json"`` for other readers.

    Returns:
        The path written.

    Raises:
        InvalidUsageError: The format is unknown, or ``path`` is none.
        OSError: The file cannot be written.

    Examples:
        >>> folder = tempfile.mkdtemp()
        >>> written = observability.dump_flight_recorder(folder + "/flight_{rank}", rank=pg.rank())
        >>> written.exists()
        True
    """
    return instrument.dump(path, rank=rank, format=format)


instrument = FlightRecorder(Config.from_environment().recorder_size)
"""The one of this process, loaded with its first group: by way of `observability.dumps`."""
