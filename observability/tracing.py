"""The recorded operations as a timeline that Perfetto and Chrome's trace viewer open.

The format is the JSON object of Google's "Trace Event Format". A process is a rank; a track is a group,
with more tracks for operations that overlap; an operation is a slice with its shapes as arguments. The
slices of one operation bear the same flow id on all ranks, so that in a file with several ranks an arrow
joins them. Times are monotonic: those of ranks on one host need no shift.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dist2.operation.signature import GroupInfo, Operation, State
from observability.flight_recorder import Recording, error_text, instrument, write_whole

Event = dict[str, Any]
"""One event of the format; times and durations in microseconds."""

LANES = 1000
"""Track numbers of one group: operations in flight at once in a ring are fewer."""


def trace_of(recording: Recording) -> dict[str, Any]:
    """Return the trace of one rank."""
    events: list[Event] = [
        _named("process_name", recording.rank, 0, f"rank {recording.rank}"),
        _numbered("process_sort_index", recording.rank, 0, recording.rank),
    ]
    by_group: dict[GroupInfo, list[Operation]] = defaultdict(list)
    for operation in recording.operations:
        by_group[operation.signature.group].append(operation)
    for number, info in enumerate(recording.groups):
        events += _tracks(recording, info, by_group[info], number * LANES + 1)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "rank": recording.rank,
            "epoch_offset_ns": recording.epoch_offset_ns,
            "complete": recording.complete,
        },
    }


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
    """
    recording = instrument.recording(rank)
    return write_whole(path, recording.rank, encode(recording))


def _tracks(
    recording: Recording, info: GroupInfo, operations: list[Operation], first_track: int
) -> list[Event]:
    """Return the slices of a group, and the names of the tracks that they need."""
    slices, lanes = [], 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for operation in operations:
        while busy and busy[0][0] <= operation.created_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, lanes)
            lanes += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (operation.finished_ns or recording.taken_ns, lane))
        slices.append(_slice(recording, operation, first_track + lane))
    names = []
    for lane in range(max(1, lanes)):
        title = f"{info.name} ({info.backend})" + (f" +{lane}" if lane else "")
        names.append(_named("thread_name", recording.rank, first_track + lane, title))
        names.append(_numbered("thread_sort_index", recording.rank, first_track + lane, first_track + lane))
    return names + slices


def _slice(recording: Recording, operation: Operation, track: int) -> Event:
    signature = operation.signature
    ended_ns = operation.finished_ns or recording.taken_ns
    event: Event = {
        "name": signature.kind.value,
        "cat": "point_to_point" if signature.kind.is_p2p else "collective",
        "ph": "X",
        "pid": recording.rank,
        "tid": track,
        "ts": operation.created_ns / 1e3,
        "dur": max(0, ended_ns - operation.created_ns) / 1e3,
        "args": _arguments(operation),
    }
    if not signature.kind.is_p2p:
        event |= {"bind_id": _flow_id(operation), "flow_in": True, "flow_out": True}
    if operation.state is State.FAILED:
        event["cname"] = "terrible"
    return event


def _arguments(operation: Operation) -> dict[str, Any]:
    signature = operation.signature
    arguments = {
        "seq": operation.seq,
        "call": operation.describe(),
        "inputs": [str(meta) for meta in signature.inputs],
        "outputs": [str(meta) for meta in signature.outputs],
        "bytes": signature.nbytes,
        "state": operation.state.value,
        "queued_us": max(0, operation.started_ns - operation.created_ns) / 1e3,
    }
    if operation.error is not None:
        arguments["error"] = error_text(operation)
    return arguments


def _flow_id(operation: Operation) -> str:
    """Return an id that is equal on all ranks of an operation."""
    what = f"{operation.signature.group.uid}#{operation.seq}".encode("utf-8", "surrogatepass")
    return f"0x{blake2b(what, digest_size=8).hexdigest()}"


def _named(event: str, rank: int, track: int, name: str) -> Event:
    return {"name": event, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _numbered(event: str, rank: int, track: int, index: int) -> Event:
    return {"name": event, "ph": "M", "pid": rank, "tid": track, "args": {"sort_index": index}}
