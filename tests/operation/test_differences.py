"""Mismatch errors name the attribute that differs first, group equal ranks, and stay short."""

from __future__ import annotations

import attrs
import pytest

from dist2.operation.description import Call, describe_calls, describe_difference
from dist2.runtime.rank_names import rank_names

CALL = Call(
    op="all_reduce", seq=7, dtypes=("float32",), shapes=((2, 4),), reduction="sum", text="all_reduce(..) #7"
)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7, 8"),
        (range(64), "ranks 0-63"),
    ],
)
def test_ranks_are_named_in_ranges(ranks: list[int], text: str) -> None:
    assert rank_names(ranks) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtypes": ("float16",)}, "dtype differs: ranks 0-6 float32, rank 7 float16"),
        ({"shapes": ((9,),)}, "shape differs: ranks 0-6 [2, 4], rank 7 [9]"),
        ({"reduction": "max"}, "reduction differs: ranks 0-6 sum, rank 7 max"),
        ({"op": "barrier"}, "operation differs: ranks 0-6 all_reduce, rank 7 barrier"),
        ({"op": "barrier", "dtypes": ()}, "operation differs: ranks 0-6 all_reduce, rank 7 barrier"),
    ],
)
def test_the_first_attribute_that_differs_is_named(changes: dict[str, object], text: str) -> None:
    calls = dict.fromkeys(range(7), CALL) | {7: attrs.evolve(CALL, **changes)}
    assert describe_difference(calls) == text


def test_shapes_of_equal_counts_do_not_differ() -> None:
    other = attrs.evolve(CALL, shapes=((8,),), root=1)
    assert describe_difference({0: CALL, 1: other}) == "root differs: rank 0 root=None, rank 1 root=1"


def test_a_rank_that_is_still_at_an_earlier_collective_is_not_compared() -> None:
    late = attrs.evolve(CALL, op="broadcast", seq=6)
    calls = {0: CALL, 1: attrs.evolve(CALL, reduction="max"), 2: late, 3: late}
    assert describe_difference(calls) == "reduction differs: rank 0 sum, rank 1 max"
    assert describe_difference({0: CALL, 2: late}) == "operation differs: rank 0 all_reduce, rank 2 broadcast"


def test_a_message_is_compared_with_its_receive_alone() -> None:
    send = attrs.evolve(CALL, op="send", reduction=None)
    recv = attrs.evolve(send, op="recv", dtypes=("int32",))
    assert describe_difference({0: send, 1: recv, 2: CALL}) == "dtype differs: rank 0 float32, rank 1 int32"


def test_messages_of_other_pairs_are_not_compared() -> None:
    def message(op: str, peer: int, dtype: str = "float32", count: int = 3) -> Call:
        return Call(op=op, peer=peer, dtypes=(dtype,), shapes=((count,),), text=op)

    sends = {0: message("send", 1, count=5), 2: message("send", 3, "float64")}
    calls = {**sends, 1: message("recv", 0, count=5), 3: message("recv", 2), 4: message("recv", 2, "int8")}
    assert describe_difference(calls) == "dtype differs: rank 2 float64, rank 3 float32"


def test_a_rank_that_did_not_say_is_left_out() -> None:
    silent = Call(text="an operation that it did not describe in time")
    assert describe_difference({0: CALL, 1: silent}) == "ranks called different operations"
    assert "rank 1 called an operation that it did not describe" in describe_calls({0: CALL, 1: silent})


def test_the_text_stays_short_with_many_ranks() -> None:
    calls = {rank: attrs.evolve(CALL, shapes=((rank,),), text=f"call {rank}") for rank in range(1000)}
    assert len(describe_difference(calls)) + len(describe_calls(calls)) < 400
    assert "and 996 other values" in describe_calls(calls)
