"""Traces: valid events, one track a group, overlapping operations side by side, flows across ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from support.fake_groups import FakeGroup, info_of, metas

from dist2.errors import PeerLostError
from dist2.operation.kinds import OpKind
from dist2.operation.parts import parts_log
from observability.flight_recorder import FlightRecorder
from observability.tracing import trace_of


def trace(recorder: FlightRecorder) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(trace_of(recorder.recording()), allow_nan=False))
    return read


def slices(of_trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in of_trace["traceEvents"] if event["ph"] == "X"]


def test_a_slice_says_what_was_called_and_how_long_it_took() -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(1), recorder)
    operation = group.run(group.signature(OpKind.ALL_REDUCE, metas([4, 3])), took_ns=5_000)
    (event,) = slices(trace(recorder))
    assert (event["name"], event["cat"], event["pid"]) == ("all_reduce", "collective", 1)
    assert event["ts"] == operation.created_ns / 1e3
    assert event["dur"] == 5.0
    arguments = event["args"]
    assert arguments["inputs"] == ["float32[4, 3]"]
    assert (arguments["seq"], arguments["bytes"], arguments["state"]) == (1, 48, "completed")
    assert "fake_groups.py" in arguments["call"]


def test_each_group_has_a_track_with_its_name() -> None:
    recorder = FlightRecorder()
    for uid in ("world", "world/split#0"):
        group = FakeGroup(info_of(uid=uid), recorder)
        group.run()
        group.run()
    seen = trace(recorder)
    names = {
        event["tid"]: event["args"]["name"] for event in seen["traceEvents"] if event["name"] == "thread_name"
    }
    tracks = [names[event["tid"]] for event in slices(seen)]
    assert tracks == ["world (socket)"] * 2 + ["world/split#0 (socket)"] * 2


def test_operations_that_overlap_lie_on_tracks_of_their_own() -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(), recorder)
    begun = [group.begin() for _ in range(3)]
    for operation in (begun[1], begun[0], begun[2]):
        group.end(operation)
    group.run()
    by_track = defaultdict(list)
    for event in slices(trace(recorder)):
        by_track[event["tid"]].append(event)
    assert len(by_track) == 3
    for events in by_track.values():
        for first, second in pairwise(events):
            assert first["ts"] + first["dur"] <= second["ts"]


def test_what_is_in_flight_or_failed_is_shown_as_such() -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(), recorder)
    group.run(error=PeerLostError("rank 1 died"))
    group.begin()
    failed, waiting = slices(trace(recorder))
    assert failed["args"]["error"] == "PeerLostError: rank 1 died"
    assert failed["cname"] == "terrible"
    assert waiting["args"]["state"] == "started"
    assert waiting["dur"] >= 0


def test_recorded_parts_lie_below_their_operation() -> None:
    recorder = FlightRecorder()
    operation = FakeGroup(info_of(), recorder).run(took_ns=5_000)
    copied, waited, ended = [operation.created_ns + at for at in (0, 2_000, 4_000)]
    parts_log.take(operation, copied, [("copy", copied, waited), ("wait", waited, ended)])
    (event, *parts) = slices(trace(recorder))
    assert [(each["name"], each["cat"], each["tid"]) for each in parts] == [
        ("copy", "part", event["tid"]),
        ("wait", "part", event["tid"]),
    ]
    assert [each["ts"] for each in parts] == [copied / 1e3, waited / 1e3]
    assert [each["dur"] for each in parts] == [2, 2]


def test_an_operation_has_the_same_flow_on_all_ranks() -> None:
    flows = []
    for rank in range(2):
        recorder = FlightRecorder()
        group = FakeGroup(info_of(rank), recorder)
        for _ in range(3):
            group.run()
        flows.append([event["bind_id"] for event in slices(trace(recorder))])
    assert flows[0] == flows[1]
    assert len(set(flows[0])) == 3


def test_a_trace_of_nothing_is_valid() -> None:
    assert slices(trace(FlightRecorder())) == []
