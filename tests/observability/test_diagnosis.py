"""The diagnosis from made-up answers: silent ranks, messages, large jobs; and the text of sets of ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.job.answer import ELSEWHERE, NO_ANSWER, NO_PART, Answer, how_ended
from observability.job.calls import shorten
from observability.job.diagnosis import MAX_WAITS, diagnose
from observability.job.gathering import read_request
from observability.job.rank_text import named, rank_text, ranks_of
from observability.job.verdict import Diagnosis, waiting_in

AFTER_S = 1.0
REFUSED = "its control plane is gone: connection refused"


def operation(seq: int, op: str = "all_reduce", uid: str = "w", **fields: Any) -> dict[str, Any]:
    """Return a rank's state of an operation that is 10 seconds old."""
    return {
        "uid": uid,
        "group": f"group-{uid}",
        "op": op,
        "seq": seq,
        "p2p": op in ("send", "recv"),
        "call": f"{op}(float32[4])",
        "where": f"job.py:{seq}",
        "age_s": 10.0,
        "peer": None,
        "tag": 0,
        "idle": False,
        "fingerprint": f"{op}",
        **fields,
    }


def rank(
    begun: int, *in_flight: dict[str, Any], ranks: str = "0-2", state: str = "open", **more: Any
) -> Answer:
    """Return the answer of a rank of one group, inside these operations."""
    recent = [operation(begun)] if begun else []
    group = {"name": "group-w", "ranks": ranks, "state": state, "begun": begun, "recent": recent}
    main = {"place": "job.py:99 in load", "inside": None, "exception": None, "for_s": 9.0}
    said = {"main": main, "groups": {"w": group}, "in_flight": list(in_flight), "failures": [], **more}
    return Answer(state=said)


def test_nothing_waits_where_operations_are_young() -> None:
    young = operation(5, age_s=0.5)
    assert diagnose({0: rank(5, young), 1: rank(4), 2: rank(5, young)}, AFTER_S) == Diagnosis()


def test_calls_that_are_told_as_columns_are_compared() -> None:
    answers = {number: rank(9, operation(10)) for number in range(3)}
    for number, answer in answers.items():
        assert answer.state is not None
        group = answer.state["groups"]["w"]
        before = [operation(seq, "barrier" if (number, seq) == (1, 7) else "all_reduce") for seq in (8, 7, 6)]
        group["recent"] += before
        shorten(group)
        assert len(group["recent"]) == 1
        assert group["earlier"]["seqs"] == [8, 7, 6]
    told = diagnose(answers, AFTER_S).divergences
    apart = "ranks 0, 2: all_reduce(float32[4]) at job.py:7; rank 1: barrier(float32[4]) at job.py:7"
    assert told == (f"group group-w diverges at operation #7: {apart}",)


def test_a_group_that_one_member_closed_or_never_made() -> None:
    waiting = operation(5)
    answers = {0: rank(5, waiting), 1: rank(4, state="closed"), 2: rank(0, groups={})}
    found = diagnose(answers, AFTER_S)
    assert found.culprits == (1, 2)
    assert "all_reduce #4 at job.py:4, then it closed the group" in found.verdict[0]
    assert "never in this group" in found.verdict[1]


def test_a_rank_of_which_not_all_groups_are_told_may_be_inside() -> None:
    unknown, waiting = rank(4, groups={}, groups_left_out=6), rank(5, operation(5))
    assert diagnose({0: waiting, 1: unknown, 2: rank(4)}, AFTER_S).culprits == (2,)
    found = diagnose({0: waiting, 1: unknown, 2: waiting}, AFTER_S)
    assert found.culprits == (1,), "nothing else is wrong"
    assert "rank 1 is waited for by ranks 0, 2" in found.verdict[0], "what it did last is not known"


def test_an_operation_that_all_have_entered_is_told() -> None:
    waiting = operation(5)
    found = diagnose({each: rank(5, waiting) for each in range(3)}, AFTER_S)
    assert found.culprits == ()
    assert found.verdict == (
        "all_reduce #5 of group group-w is entered by all ranks and has not ended for 10.0 s",
    )


def test_an_operation_that_differs_between_ranks_is_not_told_as_entered_by_all() -> None:
    calls = [operation(5), operation(5, fingerprint="other", op="broadcast", call="broadcast")]
    states = [rank(5, calls[index]) for index in (0, 0, 1)]
    for each, call in zip(states, (calls[0], calls[0], calls[1]), strict=True):
        assert each.state is not None
        each.state["groups"]["w"]["recent"] = [call]
    found = diagnose(dict(enumerate(states)), AFTER_S)
    (told,) = found.verdict
    assert told.startswith("group group-w diverges at operation #5: ranks 0, 1: ")
    assert found.culprits == (2,)
    document = found.document()
    sentence = "operation #5 of group group-w, which differs between its ranks, has not ended for 10.0 s"
    assert [each["sentence"] for each in document["waiting"]] == [sentence]
    assert [each.sentence() for each in waiting_in(document)] == [sentence]


def test_the_sentence_about_a_culprit_says_which_ranks_are_in_which_operation() -> None:
    half, whole = operation(3, uid="h"), operation(5)
    groups = {
        uid: {"name": f"group-{uid}", "ranks": ranks, "state": "open", "begun": begun, "recent": []}
        for uid, ranks, begun in (("h", "0,3", 2), ("w", "0-3", 4))
    }
    answers = {
        0: rank(4, half, ranks="0-3", groups={**groups, "h": {**groups["h"], "begun": 3}}),
        1: rank(5, whole, ranks="0-3"),
        2: rank(5, whole, ranks="0-3"),
        3: rank(4, groups=groups),
    }
    (told,) = diagnose(answers, AFTER_S).verdict
    assert "rank 3 " in told
    assert "is waited for by ranks 1, 2 in all_reduce #5 of group group-w, by rank 0 in all_reduce #3" in told
    assert "of group group-h for 10.0 s: " in told


def test_the_verdict_has_the_worker_behind_the_line_of_the_main_thread() -> None:
    late = rank(6)
    assert late.state is not None
    worker = "its worker process 7 is at data.py:3 in read (by py-spy)"
    late.state["main"]["workers"] = worker
    found = diagnose({0: rank(7, operation(7)), 1: rank(7, operation(7)), 2: late}, 0.0)
    assert found.verdict[0].endswith(f"its main thread is at job.py:99 in load; {worker}")


def test_a_rank_with_another_rank_in_its_group_is_told_with_both() -> None:
    waiting = operation(5)
    late = rank(4, ranks="1-2", host="a", pid=4711)
    assert late.state is not None
    late.state["groups"]["w"]["rank"] = 1
    answers = {1: rank(5, waiting, ranks="1-2"), 2: late}
    found = diagnose(answers, AFTER_S)
    who = "rank 2 (rank 1 of group-w, host a, pid 4711; last seen: all_reduce #4 at job.py:4)"
    assert found.verdict[0].startswith(f"{who} is waited for by rank 1 in all_reduce #5 of group group-w")
    assert found.waiting[0].sentence() == f"all_reduce #5 of group group-w waits for {who} for 10.0 s"
    assert waiting_in(found.document()) == found.waiting


def test_a_call_that_is_no_operation_is_told_once_it_takes_long() -> None:
    def inside(for_s: float) -> Answer:
        main = {"place": "job.py:9 in main", "inside": "dist2's new_group", "exception": None, "for_s": for_s}
        return rank(4, main=main)

    assert diagnose({0: inside(0.5), 1: rank(4), 2: rank(4)}, AFTER_S) == Diagnosis()
    found = diagnose({0: inside(1.5), 1: rank(4), 2: rank(4)}, AFTER_S)
    (told,) = found.verdict
    assert told.startswith("rank 0 is in dist2's new_group, called at job.py:9 in main; rank 1: ")
    assert (found.culprits, found.waiting) == ((), ()), "it may be of rank 0 alone"
    found = diagnose({0: inside(1.5), 1: rank(4), 2: inside(1.5)}, AFTER_S)
    assert found.culprits == (1,), "most ranks are in it"
    (waiting,) = found.waiting
    assert (waiting.ranks, [each.rank for each in waiting.missing]) == ((0, 2), [1])
    assert waiting.sentence().startswith("dist2's new_group at job.py:9 in main waits for rank 1 (")
    assert waiting_in(found.document()) == found.waiting


def test_the_first_new_group_is_of_all_ranks_however_few_are_in_it() -> None:
    main = {"place": "job.py:9 in main", "inside": "dist2's new_group", "exception": None, "for_s": 9.0}
    missing = {each: Answer(silence=f"no sign of {each}") for each in range(1, 7)}
    found = diagnose({0: rank(0, main=main, groups={}), **missing}, AFTER_S)
    assert found.culprits == (1, 2, 3, 4, 5, 6)
    (told,) = found.verdict
    assert told.endswith(
        "rank 1: no sign of 1; rank 2: no sign of 2; rank 3: no sign of 3; "
        "rank 4: no sign of 4; and 2 more ranks"
    )


def test_a_member_that_was_too_slow_to_answer_is_no_culprit_beside_one_that_is_missing() -> None:
    waiting, slow = operation(5), Answer(silence=f"{NO_ANSWER} 1.0 s")
    running = attrs.evolve(slow, outside={"state": "R", "words": "process 7 is running", "cause": "no lock"})
    stopped = attrs.evolve(slow, outside={"state": "T", "words": "process 7 is stopped", "cause": ""})
    gone = Answer(silence=REFUSED)
    for silent, culprits in ((slow, {2}), (running, {2}), (stopped, {1, 2}), (gone, {1, 2})):
        found = diagnose({0: rank(5, waiting), 1: silent, 2: rank(4)}, AFTER_S)
        assert {missing.rank for each in found.waiting for missing in each.missing} == culprits
        assert any(silent.why_silent in line for line in found.verdict), "its silence is told all the same"
    only = diagnose({0: rank(5, waiting), 1: running, 2: rank(5, waiting)}, AFTER_S)
    assert only.culprits == (1,)


def test_a_silent_member_is_a_culprit_with_what_is_seen_of_it() -> None:
    waiting, outside = (
        operation(5),
        {"state": "T", "words": "process 7 is stopped (by a signal): state T", "cause": ""},
    )
    answers = {0: rank(5, waiting), 1: rank(5, waiting), 2: Answer(silence="no answer", outside=outside)}
    found = diagnose(answers, AFTER_S)
    assert found.culprits == (2,)
    assert found.silent == {2: "no answer; process 7 is stopped (by a signal): state T"}
    assert "rank 2 is waited for by ranks 0, 1" in found.verdict[0]
    assert "state T" in found.verdict[0]


@pytest.mark.parametrize("peer", [0, None], ids=["from rank 0", "from any"])
def test_a_message_that_both_ends_have_entered_is_told(peer: int | None) -> None:
    sent, received = operation(5, "send", peer=1), operation(4, "recv", peer=peer, age_s=9.0)
    found = diagnose({0: rank(3, sent), 1: rank(3, received), 2: rank(3)}, AFTER_S)
    told = "send #5 of group group-w, of ranks 0 and 1, is entered by both and has not ended for 10.0 s"
    assert found.verdict == (told,), "once for both ends"
    assert (found.culprits, found.has_reason) == ((), False)
    document = found.document()
    again = "recv #4 of group group-w, of ranks 1 and 0, is entered by both and has not ended for 9.0 s"
    assert [each["sentence"] for each in document["waiting"]] == [told, again]
    assert waiting_in(document) == found.waiting


def test_an_operation_that_waits_is_never_without_a_verdict() -> None:
    differs = [operation(5), operation(5, fingerprint="other")]  # the calls themselves are not told
    found = diagnose({each: rank(5, call, ranks="0-1") for each, call in enumerate(differs)}, AFTER_S)
    assert found.waiting
    assert found.verdict


def test_a_message_meets_only_the_matching_call() -> None:
    recv = operation(1, "recv", peer=1, tag=3)
    for there, waits in (
        (operation(1, "send", peer=0, tag=3), False),
        (operation(1, "send", peer=0, tag=4), True),
        (operation(1, "send", peer=2, tag=3), True),
        (operation(1, "recv", peer=0, tag=3), True),
    ):
        found = diagnose({0: rank(0, recv), 1: rank(0, there), 2: rank(0)}, AFTER_S)
        (mine,) = (each for each in found.waiting if each.ranks == (0,))
        assert bool(mine.missing) is waits, there


@pytest.mark.parametrize(
    ("silence", "state", "culprits"),
    [(f"{NO_ANSWER} 1.0 s", "R", (2,)), (REFUSED, "S", (2,)), (REFUSED, "", (1, 2)), (REFUSED, "T", (1, 2))],
    ids=["slow", "closed its control plane", "ended", "stopped"],
)
def test_a_silent_rank_that_runs_is_no_culprit_beside_one_that_is_missing_in_another_group(
    silence: str, state: str, culprits: tuple[int, ...]
) -> None:
    outside = {"state": state, "words": "of process 7", "cause": ""}
    answers = {0: rank(5, operation(5), ranks="0,2"), 2: rank(4, ranks="0,2")}
    answers[1] = Answer(silence=silence, outside=outside)
    found = diagnose(answers, AFTER_S)
    assert found.culprits == culprits
    assert found.silent == {1: f"{silence}; of process 7"}
    assert any(answers[1].why_silent in line for line in found.verdict), "it is told all the same"


def test_a_silent_rank_that_the_others_have_shrunk_away_is_no_part_of_the_job() -> None:
    ended = {"state": "", "words": "process 7 was killed by SIGKILL", "cause": ""}
    old = {"name": "old", "ranks": "0-3", "state": "closed", "begun": 7, "recent": []}
    new = {"name": "group-w", "ranks": "0,1,3", "state": "open", "begun": 5, "recent": []}
    went_on: dict[str, Any] = {"groups": {"w": new, "old": old}, "job_is_open": False}
    inside = rank(5, operation(5), **went_on)
    answers = dict.fromkeys((0, 1, 3), inside) | {2: Answer(silence=REFUSED, outside=ended)}
    found = diagnose(answers, AFTER_S)
    assert (found.culprits, found.left, found.has_reason) == ((), (2,), False)
    assert found.verdict == (
        "all_reduce #5 of group group-w is entered by all ranks and has not ended for 10.0 s",
    )
    assert diagnose({**dict.fromkeys((0, 1, 3), rank(5, **went_on)), 2: answers[2]}, AFTER_S).verdict == ()
    failed = rank(5, groups={"w": new, "old": {**old, "state": "broken"}}, job_is_open=True)
    found = diagnose({**answers, 3: failed}, AFTER_S)
    assert (found.culprits, found.left) == ((2,), ()), "not yet"


def test_a_culprit_that_no_operation_waits_for_is_no_reason_of_a_wait() -> None:
    ended = {"state": "", "words": "process 7 was killed by SIGKILL", "cause": ""}
    world = {"name": "world", "ranks": "0-2", "state": "open", "begun": 5, "recent": []}
    pair = {"name": "group-w", "ranks": "0,1", "state": "open", "begun": 5, "recent": []}
    inside = rank(5, operation(5), groups={"w": pair, "world": world})
    found = diagnose({0: inside, 1: inside, 2: Answer(silence=REFUSED, outside=ended)}, AFTER_S)
    assert (found.culprits, found.has_reason) == ((2,), False)


def test_a_slow_rank_is_the_culprit_where_nothing_else_is_wrong() -> None:
    busy = {"state": "R", "words": "process 7 is running", "cause": "no lock"}
    found = diagnose({0: rank(5), 1: Answer(silence=f"{NO_ANSWER} 1.0 s", outside=busy)}, AFTER_S)
    assert found.culprits == (1,)
    assert found.silent == {1: f"{NO_ANSWER} 1.0 s; process 7 is running: no lock"}


def test_the_verdict_says_once_why_no_line_is_known() -> None:
    unseen = {"state": "S", "words": "it is asleep", "cause": "", "unseen": "py-spy is not installed: pip"}
    silent = Answer(silence=f"{NO_ANSWER} 1.0 s", outside=unseen)
    seen = Answer(silence=silent.silence, outside={**unseen, "stands": "it is at job.py:1", "unseen": ""})
    answers = {0: rank(5, operation(5), ranks="0-3"), 1: silent, 2: silent, 3: seen}
    found = diagnose(answers, AFTER_S)
    assert found.culprits == (1, 2, 3)
    hints = [each for each in found.verdict if "py-spy" in each]
    assert hints == ["it is not known where ranks 1, 2 stand: py-spy is not installed: pip"]


def test_ranks_of_other_hosts_are_judged_by_the_operation_they_were_seen_at() -> None:
    def elsewhere(seq: int) -> Answer:
        return Answer(silence=f"{ELSEWHERE} host b", seen={"w": f"all_reduce(float32[4]) #{seq} at job.py:1"})

    waiting = rank(5, operation(5))
    found = diagnose({0: waiting, 1: elsewhere(5), 2: elsewhere(4)}, AFTER_S)
    assert found.culprits == (2,)
    (verdict,) = found.verdict
    assert "rank 2 (last seen: all_reduce(float32[4]) #4 at job.py:1) is waited for by rank 0 " in verdict
    assert "its part is on host b" in verdict
    found = diagnose({0: waiting, 1: rank(4), 2: elsewhere(4)}, AFTER_S)
    assert found.culprits == (1,), "what is known for sure goes first"


def test_a_rank_that_could_not_write_its_part_is_not_accused_beside_one_that_is_missing() -> None:
    waiting = rank(5, operation(5))
    assert diagnose({0: waiting, 1: Answer(silence=NO_PART), 2: rank(4)}, AFTER_S).culprits == (2,)
    stopped = {"state": "T", "words": "process 7 is stopped", "cause": ""}
    answers = {0: waiting, 1: Answer(silence=NO_PART, outside=stopped), 2: rank(4)}
    assert diagnose(answers, AFTER_S).culprits == (1, 2)
    assert diagnose({0: waiting, 1: Answer(silence=NO_PART), 2: waiting}, AFTER_S).culprits == (1,)


def test_a_closed_control_plane_holds_no_lock() -> None:
    asleep = {"state": "S", "words": "process 7 is asleep (state S)", "cause": "code in C holds the lock"}
    answer = Answer(silence=REFUSED, outside=asleep)
    assert answer.why_silent.endswith("refused; process 7 is asleep (state S)")


def counted(answer: Answer, **messages: dict[str, int]) -> Answer:
    """Add the numbers of messages of a rank to its answer."""
    assert answer.state is not None
    answer.state["groups"]["w"]["messages"] = {"sent": {}, "received": {}, **messages}
    return answer


def test_operations_for_which_no_thread_waits_make_no_deadlock() -> None:
    def posted(peer: int) -> Answer:
        return rank(0, operation(1, "recv", peer=peer, idle=True), ranks="0-1")

    found = diagnose({0: posted(1), 1: posted(0)}, AFTER_S)
    assert (found.culprits, found.cycles) == ((), ())
    (told,) = found.verdict
    assert told.startswith(
        "rank 0: its main thread is at job.py:99 in load; no thread of it waits for recv #1"
    )
    assert "no deadlock: rank 0 waits for rank 1 in recv #1" in told


def test_a_rank_that_polls_for_an_operation_waits_where_nothing_else_is_wrong() -> None:
    polls = rank(5, operation(5, idle=True))
    found = diagnose({0: polls, 1: polls, 2: rank(4)}, AFTER_S)
    assert found.culprits == (2,)
    first, second = (f"group-{uid}" for uid in "wx")
    groups = {
        uid: {"name": name, "ranks": "0-2", "state": "open", "begun": 5, "recent": []}
        for uid, name in (("w", first), ("x", second))
    }
    late = {**groups, "x": {**groups["x"], "begun": 4}}
    chain = {
        0: rank(5, operation(5, idle=True), groups={**groups, "w": {**groups["w"], "begun": 5}}),
        1: rank(4, operation(5, uid="x", idle=True), groups={**groups, "w": {**groups["w"], "begun": 4}}),
        2: rank(5, groups=late),
    }
    assert diagnose(chain, AFTER_S).culprits == (2,), "rank 1 waits, too"


def test_receives_that_were_posted_in_advance_on_many_ranks_do_not_hide_what_all_wait_for() -> None:
    everyone = f"0-{MAX_WAITS + 43}"
    answers = {}
    for number in range(MAX_WAITS + 44):
        posted = operation(1, "recv", peer=(number or 300) - 1, idle=True, age_s=100.0 + number / 1000)
        answers[number] = rank(5, posted, operation(5, age_s=60.0), ranks=everyone)
    answers[7] = rank(4, posted, ranks=everyone)
    found = diagnose(answers, AFTER_S)
    assert found.culprits == (7,)
    assert found.has_reason
    assert len(found.waiting) == MAX_WAITS
    assert [each.op for each in found.waiting].count("all_reduce") == 1


def test_of_many_messages_only_the_ranks_at_the_ends_are_to_blame() -> None:
    """Of 8 stages of a pipeline with 64 ranks each, all but the first wait for the stage before."""
    everyone = "0-511"
    answers = {number: rank(5, ranks=everyone) for number in range(64)}
    for number in range(64, 512):
        received = operation(6, "recv", peer=number - 64, age_s=60.0 + number * 7 % 64 / 64)
        answers[number] = rank(5, received, ranks=everyone)
    found = diagnose(answers, AFTER_S)
    assert found.culprits == tuple(range(64))
    assert len(found.waiting) == MAX_WAITS
    assert {missing.rank for each in found.waiting for missing in each.missing} >= {*range(64)}


def test_the_verdict_on_thousands_of_ranks_stays_short() -> None:
    everyone = f"0-{4 * MAX_WAITS - 1}"
    receives = {
        number: rank(5, operation(6, "recv", peer=number + 2 * MAX_WAITS), ranks=everyone)
        for number in range(2 * MAX_WAITS)
    }
    late = dict.fromkeys(range(2 * MAX_WAITS, 4 * MAX_WAITS), rank(5, ranks=everyone))
    found = diagnose(receives | late, AFTER_S)
    assert found.culprits == tuple(range(2 * MAX_WAITS, 4 * MAX_WAITS))
    assert len(found.verdict) == MAX_WAITS + 1
    assert found.verdict[-1] == f"{MAX_WAITS} more ranks are waited for"
    ring = {
        number: rank(5, operation(6, "recv", peer=(number + 1) % 300), ranks="0-299") for number in range(300)
    }
    (told,) = diagnose(ring, AFTER_S).verdict
    assert told.startswith("deadlock: rank 0 waits for rank 1 in recv #6 of group group-w at job.py:6, ")
    assert told.endswith(", and so on, 284 more ranks")


def test_of_a_cycle_the_rank_that_made_fewer_calls_is_the_culprit() -> None:
    receives = operation(8, "recv", peer=0)
    answers = {
        0: counted(rank(5, operation(5), ranks="0-1"), sent={"1/0": 7}),
        1: counted(rank(4, receives, ranks="0-1"), received={"0/0": 7}),
    }
    found = diagnose(answers, AFTER_S)
    assert found.culprits == (0,)
    assert (
        "rank 0 has sent 7 messages to rank 1 in group group-w, which waits for the 8th" in found.verdict[0]
    )
    answers[0] = counted(rank(5, operation(5), ranks="0-1"), sent={"1/0": 8})
    assert diagnose(answers, AFTER_S).culprits == (), "the message is on its way: neither is to blame"
    both = {one: counted(rank(0, operation(1, "send", peer=1 - one), ranks="0-1")) for one in range(2)}
    found = diagnose(both, AFTER_S)
    assert found.culprits == ()
    assert found.verdict[0].startswith("deadlock: ")


def test_of_a_cycle_in_which_all_made_fewer_calls_the_counts_are_told() -> None:
    receives = [operation(8, "recv", peer=1 - one) for one in range(2)]
    answers = {
        0: counted(rank(7, receives[0], ranks="0-1"), sent={"1/0": 7}),
        1: counted(rank(7, receives[1], ranks="0-1"), received={"0/0": 7}),
    }
    found = diagnose(answers, AFTER_S)
    assert found.culprits == ()
    (told,) = found.verdict
    assert told.startswith("deadlock: ")
    assert "rank 0 has sent 7 messages to rank 1 in group group-w, which waits for the 8th" in told
    assert "rank 1 has sent 0 messages to rank 0 in group group-w, which waits for the 1st" in told


def test_a_receive_from_any_waits_for_all_others() -> None:
    found = diagnose({0: rank(0, operation(1, "recv")), 1: rank(0), 2: rank(0)}, AFTER_S)
    (waiting,) = found.waiting
    assert [each.rank for each in waiting.missing] == [1, 2]


def test_ranks_that_wait_for_each_other_are_told_once_from_the_lowest() -> None:
    """Ranks 1 and 2 wait for rank 0, and it for both: neither stands out."""
    answers = {0: rank(5, operation(5)), 1: rank(4), 2: rank(4)}
    for each, uid in ((1, "x"), (2, "y")):
        group = {"name": f"group-{uid}", "ranks": f"0,{each}", "state": "open", "begun": 1, "recent": []}
        state = answers[each].state
        assert state is not None
        state["groups"][uid] = group
        state["in_flight"] = [operation(1, uid=uid)]
    found = diagnose(answers, AFTER_S)
    (cycle,) = found.cycles
    assert cycle.startswith("rank 0 waits for rank 1")
    assert found.culprits == ()


def test_of_two_ranks_that_diverge_neither_is_the_culprit() -> None:
    answers = {each: rank(5, ranks="0-1") for each in range(2)}
    state = answers[1].state
    assert state is not None
    state["groups"]["w"]["recent"] = [operation(5, "barrier")]
    found = diagnose(answers, AFTER_S)
    assert "diverges at operation #5" in found.verdict[0]
    assert found.culprits == ()


def test_two_against_two_are_a_deadlock_without_an_odd_one() -> None:
    answers = {each: rank(5, operation(5), ranks="0-3") for each in (0, 1)}
    answers |= {each: rank(4, operation(1, "recv", peer=each - 2), ranks="0-3") for each in (2, 3)}
    found = diagnose(answers, AFTER_S)
    assert len(found.cycles) == 2
    assert found.culprits == ()


def test_a_document_is_read_back() -> None:
    found = diagnose({0: rank(5, operation(5)), 1: rank(5, operation(5)), 2: rank(4)}, AFTER_S)
    document = json.loads(json.dumps(found.document()))
    assert waiting_in(document) == found.waiting


def test_ten_thousand_ranks_are_judged_at_once() -> None:
    waiting = operation(5)
    answers = {each: rank(5, waiting, ranks="0-9999") for each in range(10_000)}
    answers[4321] = rank(4, ranks="0-9999")
    start = time.monotonic()
    found = diagnose(answers, AFTER_S)
    assert found.culprits == (4321,)
    assert "ranks 0-4320, 4322-9999" in found.verdict[0]
    assert time.monotonic() - start < 10


def test_many_missing_ranks_are_summed_up() -> None:
    answers = {each: rank(4, ranks="0-99") for each in range(100)}
    answers[0] = rank(5, operation(5), ranks="0-99")
    (waiting,) = diagnose(answers, AFTER_S).waiting
    assert "waits for ranks 1-64 and 35 more for 10.0 s" in waiting.sentence()


# Sets of ranks


@given(st.lists(st.integers(0, 300), unique=True))
def test_ranks_are_read_back(ranks: list[int]) -> None:
    assert ranks_of(rank_text(ranks)) == ranks


def test_regular_sets_of_ranks_are_short() -> None:
    assert rank_text(range(10_000)) == "0-9999"
    assert rank_text(range(0, 64, 8)) == "0-56:8"
    assert rank_text([3, 1, 2]) == "3,1,2"
    assert named([2]) == "rank 2"
    assert named(range(0, 100, 3), 2) == "ranks 0-99 in steps of 3"


# Answers of other ranks

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries({"protocol": st.just(1), "what": JSON, "limit_s": JSON, "entries": JSON})


@given(JSON | FIELDS)
def test_a_request_of_another_rank_is_read_or_refused(body: Any) -> None:
    try:
        entries, _, limit_s = read_request(body)
    except ValueError:
        return
    assert 0 < limit_s <= 60
    assert all(isinstance(attrs.asdict(each)["url"], str) for each in entries)


@pytest.mark.parametrize(
    "end",
    ["was killed by SIGKILL (the kernel killed a process of this host for lack of memory since)"]
    + ["was killed by SIGSEGV", "was killed by signal 40", "exited with code 3"],
)
def test_the_end_of_a_process_is_read_from_the_errors_of_others(end: str) -> None:
    failure = {"message": f"all_reduce #7: rank 2 (host a, pid 41) {end}; the group is broken"}
    told = {0: rank(7, failures=[failure]), 1: Answer(silence=REFUSED)}
    assert (how_ended(41, told), how_ended(4, told)) == (end, "")
