"""The members of a group made from another."""

from __future__ import annotations

import pytest

from dist2 import InvalidUsageError
from dist2.membership.members import by_color, subgroup, without
from dist2.operation.signature import GroupInfo, context_id


def parent(rank: int) -> GroupInfo:
    return GroupInfo("world", "default", "training", "socket", rank, (10, 11, 12, 13))


def test_members_of_a_split_agree_without_a_message() -> None:
    infos = [subgroup(parent(rank), (3, 1), 0, "split", None, None) for rank in (3, 1)]
    assert [info.rank for info in infos] == [0, 1]
    assert {info.uid for info in infos} == {"world/split(3,1)#0"}
    assert {info.global_ranks for info in infos} == {(13, 11)}
    assert infos[0].desc == "training"


def test_the_same_ranks_again_are_another_group() -> None:
    first, second = (subgroup(parent(1), (1, 2), nth, "split", None, None) for nth in (0, 1))
    assert first.uid != second.uid
    assert context_id(first.uid) != context_id(second.uid)


def test_a_name_may_be_given() -> None:
    info = subgroup(parent(0), (0,), 0, "split", "pipeline", "stage 0")
    assert (info.name, info.desc) == ("pipeline", "stage 0")


def test_colors_split_as_mpi_does() -> None:
    choices = [(1, 5), (0, 0), (1, 3), (1, 5)]
    assert by_color(choices, 0) == (2, 0, 3)
    assert by_color(choices, 1) == (1,)
    assert by_color(choices, 2) == by_color(choices, 3) == (2, 0, 3)


def test_leaving_ranks_out() -> None:
    assert without(4, [0, 2]) == (1, 3)
    with pytest.raises(InvalidUsageError, match="all 2 ranks"):
        without(2, [1, 0])


def test_context_ids_fit_the_wire_and_differ() -> None:
    ids = {context_id(f"world/split({n})") for n in range(1000)}
    assert len(ids) == 1000
    assert all(0 < each < 1 << 64 for each in ids)
