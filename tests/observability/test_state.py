"""The description of one rank by itself: what it tells where there is more than it can tell."""

from __future__ import annotations

from support.fake_groups import FakeGroup, info_of

from dist2.operation.kinds import OpKind
from observability.flight_recorder import FlightRecorder
from observability.job.member import Member
from observability.job.state import MAX_IN_FLIGHT
from observability.metrics import Metrics


def test_receives_that_were_posted_in_advance_do_not_hide_the_operation_of_a_rank() -> None:
    metrics, recorder = Metrics(), FlightRecorder()
    group = FakeGroup(info_of(), metrics, recorder)
    for _ in range(MAX_IN_FLIGHT):
        posted = group.begin(group.signature(OpKind.RECV, peer=1))
        posted.is_async = True
    group.begin(group.signature(OpKind.ALL_REDUCE)).is_async = True
    group.begin(group.signature(OpKind.BARRIER))
    state = Member(metrics, recorder).witness.state()
    told = [(each["op"], each["idle"]) for each in state["in_flight"]]
    assert told == [("recv", True)] * (MAX_IN_FLIGHT - 2) + [("all_reduce", True), ("barrier", False)]
    assert state["in_flight_count"] == MAX_IN_FLIGHT + 2
