"""The recorded operations as a timeline that Perfetto and Chrome's trace viewer open.

The format is the JSON object of Google's "Trace Event Format". A process is a rank; a track is a group,
with more tracks for operations that overlap; an operation is a slice with its shapes as arguments. The
slices of one operation bear the same flow id on all ranks, so that in a file with several ranks an arrow
joins them; so do a message's.

`Timeline` is the record of one rank, as plain data that travels between control planes. `merged`
puts those of several ranks on one clock, and adds a fact that needs all of them: an operation in which
all ranks wait for all, and a receive, fall into *wait*, until the last rank has called it, and *move*. Where
parts were recorded (`record_parts`), an operation falls into those instead. Times are those of
the monotonic clock of the rank that merges; of the others' it is known how far they are off, and by how
much that may be wrong.
"""

from __future__ import annotations

import heapq
import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from time import monotonic_ns
from typing import Any

import attrs

from dist2.errors import InvalidUsageError
from dist2.operation.kinds import OpKind
from dist2.operation.parts import parts_log
from dist2.operation.record import Operation
from observability.clocks import Offset, clock_id
from observability.entries import MEETINGS
from observability.exposition import bus_share
from observability.flight_recorder import (
    Channel,
    FlightRecorder,
    Recording,
    channel_of,
    error_text,
    first_messages,
    instrument,
    write_whole,
)

Event = dict[str, Any]
"""One event of the format; times and durations in microseconds."""

MOST_SECONDS = 3600
"""Parts are recorded for this long at most."""

LANES = 1000
"""Track numbers of one group: operations in flight at once in a ring are fewer."""

_MEETINGS = frozenset(kind.value for kind in MEETINGS)
_MESSAGES = (OpKind.SEND.value, OpKind.RECV.value)


@attrs.frozen
class Slice:
    """One operation of one rank, as plain data.

    Attributes:
        group: Index of the group in `Timeline.groups`.
        op: Modern name.
        seq: Number in the group.
        flow: Equal for the same operation or message on all ranks that take part; empty if unknown.
        created_ns: Monotonic nanosecond of the call,
        started_ns: of the moment when it left the queue; 0 before,
        finished_ns: of its end; 0 before.
        nbytes: Payload.
        state: Its state.
        call: In words.
        inputs: Shapes and dtypes read,
        outputs: and written.
        error: Its error in words.
        parts: Name, begin and end of each `dist2.operation.parts.Part`; empty if they were not recorded.
    """

    group: int
    op: str
    seq: int
    flow: str
    created_ns: int
    started_ns: int
    finished_ns: int
    nbytes: int
    state: str
    call: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    error: str = ""
    parts: Sequence[tuple[str, int, int]] = ()


@attrs.frozen
class TracedGroup:
    """A group, as traces name it."""

    uid: str
    name: str
    backend: str
    ranks: Sequence[int]


@attrs.frozen
class Timeline:
    """The operations of one rank.

    Attributes:
        rank: In the job.
        host: Its host.
        pid: Its process.
        clock: Its `clock_id`.
        groups: The groups that are open or have operations below.
        slices: Its operations, in the order of their calls.
        complete: Whether it goes back to the first operation of the process, or as far as was asked for.
        taken_ns: Monotonic nanosecond at which it was taken.
        epoch_offset_ns: Nanoseconds to add to a monotonic time to get those since 1970.
    """

    rank: int
    host: str
    pid: int
    clock: str
    groups: Sequence[TracedGroup]
    slices: Sequence[Slice]
    complete: bool
    taken_ns: int
    epoch_offset_ns: int

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return attrs.asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Timeline:
        """Read it back.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        fields = dict(document)
        groups = [TracedGroup(**each) for each in fields.pop("groups")]
        slices = [Slice(**each) for each in fields.pop("slices")]
        if any(not 0 <= each.group < len(groups) for each in slices):
            raise ValueError("an operation is of no group that is listed")
        return cls(groups=groups, slices=slices, **fields)


def timeline_of(recording: Recording, since_ns: int = 0, most: int | None = None) -> Timeline:
    """Return the operations of a rank.

    Args:
        recording: Its flight recorder.
        since_ns: Leave out operations that ended before this monotonic nanosecond.
        most: Leave out all but so many operations, the last ones.
    """
    numbers = {info: number for number, info in enumerate(recording.groups)}
    messages = first_messages(recording)
    slices = []
    for operation in recording.operations:
        flow = _flow(operation, messages)
        if not operation.finished_ns or operation.finished_ns >= since_ns:
            slices.append(_slice_of(operation, numbers[operation.signature.group], flow))
    return Timeline(
        rank=recording.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        clock=clock_id(),
        groups=[
            TracedGroup(info.uid, info.name, info.backend, info.global_ranks) for info in recording.groups
        ],
        slices=slices if most is None else slices[-most:],
        complete=(recording.complete or bool(slices and slices[0].created_ns < since_ns))
        and (most is None or len(slices) <= most),
        taken_ns=recording.taken_ns,
        epoch_offset_ns=recording.epoch_offset_ns,
    )


def recent(recorder: FlightRecorder, rank: int | None, seconds: float, most: int | None = None) -> Timeline:
    """Return the operations of a rank in the last seconds, as far as the recorder has them.

    Args:
        recorder: Remembers.
        rank: In the job; None for that of the first group.
        seconds: How far back.
        most: How many operations at most, the last ones.
    """
    return timeline_of(recorder.recording(rank), monotonic_ns() - int(seconds * 1e9), most)


def record_parts(seconds: float) -> None:
    """Record for some seconds when operations of this process copy, wait, send, receive and reduce.

    Traces show that below each operation. Only the backend ``socket`` can tell. An operation of 8 bytes over
    shared memory takes about three microseconds longer meanwhile.

    Args:
        seconds: For how long; 0 stops it.

    Raises:
        InvalidUsageError: ``seconds`` is no number from 0 to 3,600.

    Examples:
        >>> observability.record_parts(5)
        >>> pg.barrier()
        >>> observability.record_parts(0)
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= MOST_SECONDS:
        raise InvalidUsageError(f"seconds must be from 0 to {MOST_SECONDS}, got {seconds!r}")
    if seconds:
        parts_log.record(seconds)
    else:
        parts_log.stop()


def trace_of(recording: Recording) -> dict[str, Any]:
    """Return the trace of one rank."""
    return merged([(timeline_of(recording), Offset())])


def encode(recording: Recording) -> bytes:
    """Return the trace of one rank as JSON."""
    return json.dumps(trace_of(recording)).encode()


def write_trace(path: str | Path, *, rank: int | None = None) -> Path:
    """Write the last operations of this process as a trace; open it at ui.perfetto.dev.

    Args:
        path: The file; ``{rank}`` in it stands for the rank in the job. Its folder is made where there is
            none.
        rank: The rank in the job on whose behalf to write; only of use where ranks are threads.

    Returns:
        The path written.

    Raises:
        InvalidUsageError: ``path`` is none.
        OSError: The file cannot be written.

    Examples:
        >>> pg.barrier()
        >>> observability.write_trace(tempfile.mkdtemp() + "/trace_{rank}.json", rank=pg.rank()).exists()
        True
    """
    recording = instrument.recording(rank)
    return write_whole(path, recording.rank, encode(recording))


def merged(
    timelines: Iterable[tuple[Timeline, Offset]], missing: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return one trace of several ranks.

    Args:
        timelines: Of each rank, and how far its clock is off.
        missing: Ranks that are not there, and why: noted in the trace.
    """
    told = sorted(timelines, key=lambda pair: pair[0].rank)
    last_calls = _last_calls(told)
    events: list[Event] = []
    for timeline, offset in told:
        events += _events(timeline, offset, last_calls)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "ranks": [
                {
                    "rank": timeline.rank,
                    "host": timeline.host,
                    "pid": timeline.pid,
                    "complete": timeline.complete,
                    "epoch_offset_ns": timeline.epoch_offset_ns,
                    "clock_offset_ns": offset.offset_ns,
                    "clock_error_ns": offset.error_ns,
                }
                for timeline, offset in told
            ],
            "missing": {str(rank): why for rank, why in (missing or {}).items()},
        },
    }


def _last_calls(told: Sequence[tuple[Timeline, Offset]]) -> dict[str, int]:
    """Return the time of the last call of each meeting or message that all ranks of it have reported."""
    calls: dict[str, list[int]] = defaultdict(list)
    members: dict[str, int] = {}
    for timeline, offset in told:
        for each in timeline.slices:
            if each.flow and (each.op in _MEETINGS or each.op in _MESSAGES):
                calls[each.flow].append(each.created_ns + offset.offset_ns)
                members[each.flow] = 2 if each.op in _MESSAGES else len(timeline.groups[each.group].ranks)
    return {flow: max(times) for flow, times in calls.items() if len(times) == members[flow] > 1}


def _events(timeline: Timeline, offset: Offset, last_calls: Mapping[str, int]) -> Iterator[Event]:
    """Yield the events of one rank."""
    rank = timeline.rank
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield {
        "name": "process_labels",
        "ph": "M",
        "pid": rank,
        "args": {"labels": f"{timeline.host}, pid {timeline.pid}"},
    }
    yield _numbered("process_sort_index", rank, 0, rank)
    by_group: dict[int, list[Slice]] = defaultdict(list)
    for each in timeline.slices:
        by_group[each.group].append(each)
    for number, group in enumerate(timeline.groups):
        yield from _tracks(timeline, offset, group, by_group[number], number * LANES + 1, last_calls)
    yield from _bandwidth(timeline, offset)


def _tracks(
    timeline: Timeline,
    offset: Offset,
    group: TracedGroup,
    slices: Sequence[Slice],
    first_track: int,
    last_calls: Mapping[str, int],
) -> list[Event]:
    """Return the slices of a group, and the names of the tracks that they need."""
    events: list[Event] = []
    lanes = 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for each in slices:
        while busy and busy[0][0] <= each.created_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, lanes)
            lanes += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (each.finished_ns or timeline.taken_ns, lane))
        # A send may end before its receive is called.
        last_call_ns = None if each.op == OpKind.SEND.value else last_calls.get(each.flow)
        events += _slice(timeline, offset, each, first_track + lane, last_call_ns)
    names = []
    for lane in range(max(1, lanes)):
        title = f"{group.name} ({group.backend})" + (f" +{lane}" if lane else "")
        track = first_track + lane
        names.append(_named("thread_name", timeline.rank, track, title))
        names.append(_numbered("thread_sort_index", timeline.rank, track, track))
    return names + events


def _slice(
    timeline: Timeline, offset: Offset, operation: Slice, track: int, last_call_ns: int | None
) -> Iterator[Event]:
    """Yield an operation, and below it the parts that it falls into."""
    begun_ns = operation.created_ns + offset.offset_ns
    ended_ns = max(begun_ns, (operation.finished_ns or timeline.taken_ns) + offset.offset_ns)
    event = _span(timeline.rank, track, operation.op, begun_ns, ended_ns)
    event["cat"] = "point_to_point" if operation.op in _MESSAGES else "collective"
    event["args"] = _arguments(operation)
    if operation.flow:
        event |= {"bind_id": _flow_id(operation.flow), "flow_in": True, "flow_out": True}
    if operation.error:
        event["cname"] = "terrible"
    yield event
    at_ns = begun_ns
    if operation.started_ns > operation.created_ns:
        at_ns = min(ended_ns, operation.started_ns + offset.offset_ns)
        yield _part(timeline.rank, track, "queued", begun_ns, at_ns)
    for name, part_begun_ns, part_ended_ns in operation.parts:
        yield _part(
            timeline.rank, track, name, part_begun_ns + offset.offset_ns, part_ended_ns + offset.offset_ns
        )
    if last_call_ns is not None and not operation.parts:
        parted_ns = min(max(at_ns, last_call_ns), ended_ns)
        yield _part(timeline.rank, track, "wait", at_ns, parted_ns)
        yield _part(timeline.rank, track, "move", parted_ns, ended_ns)


def _span(rank: int, track: int, name: str, begun_ns: int, ended_ns: int) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": rank,
        "tid": track,
        "ts": begun_ns / 1e3,
        "dur": (ended_ns - begun_ns) / 1e3,
    }


def _part(rank: int, track: int, name: str, begun_ns: int, ended_ns: int) -> Event:
    return {**_span(rank, track, name, begun_ns, ended_ns), "cat": "part"}


def _bandwidth(timeline: Timeline, offset: Offset) -> Iterator[Event]:
    """Yield a counter of the bus bandwidth of operations that run: their sum, where several do."""
    steps: list[tuple[int, float]] = []
    for each in timeline.slices:
        begun_ns = max(each.created_ns, each.started_ns)
        took_ns = each.finished_ns - begun_ns
        share = bus_share(each.op, max(1, len(timeline.groups[each.group].ranks)))
        if took_ns > 0 and not each.error and each.nbytes * share:
            rate = each.nbytes * share / took_ns  # bytes a nanosecond are gigabytes a second
            steps += [(begun_ns, rate), (each.finished_ns, -rate)]
    running = 0.0
    for at_ns, change in sorted(steps):
        running = max(0.0, running + change)
        yield {
            "name": "bus bandwidth",
            "ph": "C",
            "pid": timeline.rank,
            "ts": (at_ns + offset.offset_ns) / 1e3,
            "args": {"GB/s": round(running, 9)},
        }


def _slice_of(operation: Operation, group: int, flow: str) -> Slice:
    signature = operation.signature
    return Slice(
        group=group,
        op=signature.kind.value,
        seq=operation.seq,
        flow=flow,
        created_ns=operation.created_ns,
        started_ns=operation.started_ns,
        finished_ns=operation.finished_ns,
        nbytes=signature.nbytes,
        state=operation.state.value,
        call=operation.describe(),
        inputs=[str(meta) for meta in signature.inputs],
        outputs=[str(meta) for meta in signature.outputs],
        error=error_text(operation),
        parts=[(part.name, part.begun_ns, part.ended_ns) for part in parts_log.of(operation)],
    )


def _arguments(operation: Slice) -> dict[str, Any]:
    arguments = {
        "seq": operation.seq,
        "call": operation.call,
        "inputs": operation.inputs,
        "outputs": operation.outputs,
        "bytes": operation.nbytes,
        "state": operation.state,
        "queued_us": max(0, operation.started_ns - operation.created_ns) / 1e3,
    }
    if operation.error:
        arguments["error"] = operation.error
    return arguments


def _flow(operation: Operation, messages: dict[Channel, int]) -> str:
    """Return an id equal for an operation on all ranks, and for a message on both; count the message."""
    signature = operation.signature
    if not signature.kind.is_p2p:
        return f"{signature.group.uid}#{operation.seq}" if operation.seq else ""
    channel = channel_of(operation)
    if channel is None:
        return ""
    number = messages[channel]
    messages[channel] += 1
    _, source, destination, tag = channel
    return f"{signature.group.uid}/{source}>{destination}/{tag}#{number}"


def _flow_id(flow: str) -> str:
    return f"0x{blake2b(flow.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _named(event: str, rank: int, track: int, name: str) -> Event:
    return {"name": event, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _numbered(event: str, rank: int, track: int, index: int) -> Event:
    return {"name": event, "ph": "M", "pid": rank, "tid": track, "args": {"sort_index": index}}
