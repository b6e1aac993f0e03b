"""The description of one rank by itself: what it tells where there is more than it can tell."""

from __future__ import annotations

import pytest
from support.fake_groups import FakeGroup, info_of

from dist2.operation.kinds import OpKind
from observability.flight_recorder import FlightRecorder
from observability.job.answer import Answer
from observability.job.diagnosis import diagnose
from observability.job.member import Member
from observability.job.state import MAX_GROUPS, MAX_IN_FLIGHT
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


@pytest.mark.parametrize("waiting", [0, MAX_GROUPS + 5], ids=["in the first group", "in the last group"])
def test_a_rank_of_many_groups_is_named_that_the_others_wait_for(waiting: int) -> None:
    answers = {}
    for rank in range(4):
        metrics, recorder = Metrics(), FlightRecorder()
        groups = [
            FakeGroup(info_of(rank, 4, uid=f"g{number}"), metrics, recorder)
            for number in range(MAX_GROUPS + 6)
        ]
        for group in groups:
            group.run()
        if rank != 2:
            groups[waiting].begin()
        state = Member(metrics, recorder).witness.state()
        assert (len(state["groups"]), state["groups_left_out"]) == (MAX_GROUPS, 6)
        assert ("g0" in state["groups"]) is (waiting == 0 and rank != 2)
        assert f"g{MAX_GROUPS + 5}" in state["groups"], "used last"
        answers[rank] = Answer(state=state)
    found = diagnose(answers, after_s=0.0)
    assert found.culprits == (2,)
    assert [each.ranks for each in found.waiting] == [(0, 1, 3)]
