"""The ranks of a merged group."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from support.threads import together
from support.time_limits import in_time

from dist2 import HashStore
from dist2.errors import InvalidUsageError, WireError
from dist2.membership.members import subgroup
from dist2.membership.merging import Comer, in_order, meet
from dist2.operation.signature import GroupInfo


def group(uid: str, global_ranks: Sequence[int]) -> list[GroupInfo]:
    return [GroupInfo(uid, uid, "", "socket", rank, tuple(global_ranks)) for rank in range(len(global_ranks))]


def part(infos: list[GroupInfo], ranks: Sequence[int], kind: str = "survivors") -> list[GroupInfo]:
    return [subgroup(infos[rank], ranks, 0, kind, None, None) for rank in ranks]


OLD = group("5eed", range(4))
MERGED = group("merge(5eed/survivors(1,2,3)#0+beef)#70ken", range(4))
NEW = group("beef", [0])
OTHER = group("cafe", range(2))

CASES: dict[str, list[list[GroupInfo]]] = {
    "the first one died": [part(OLD, [1, 2, 3]), NEW],
    "the last one died": [part(OLD, [0, 1, 2]), NEW],
    "one is left": [part(OLD, [3]), NEW],
    "two newcomers": [part(OLD, [2, 3]), NEW, group("feed", [0])],
    "twice in a row": [part(part(OLD, [1, 2, 3]), [1, 2]), NEW],
    "after an earlier merge": [part(MERGED, [1, 2, 3]), NEW],
    "halves": [part(OLD, [0, 1], "split"), part(OLD, [2, 3], "split")],
    "parts of unequal size": [part(OLD, [0], "split"), part(OLD, [1, 2, 3], "split")],
    "parts and a newcomer": [part(OLD, [1], "split"), part(OLD, [2, 3], "split"), NEW],
    "a smaller job": [OLD, OTHER],
}


@pytest.mark.parametrize("name", CASES)
def test_the_groups_come_in_this_order_whoever_is_first_to_meet(name: str) -> None:
    everyone = [info for each in CASES[name] for info in each]
    comers = [
        Comer(str(index), info.uid, info.rank, info.global_ranks[info.rank])
        for index, info in enumerate(everyone)
    ]
    for seed in range(5):
        came = list(comers)
        random.Random(seed).shuffle(came)
        assert in_order(came) == comers


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 10_000,
        b'{"token": "t", "uid": "u", "rank": "0", "global_rank": 0}',
        b'{"token": "t", "uid": "u", "rank": 0, "global_rank": 0, "more": 1}',
    ],
    ids=["nothing", "no text", "a list", "no fields", "very deep", "a rank that is none", "a field too many"],
)
def test_what_no_rank_has_written_is_refused(written: bytes) -> None:
    store = HashStore()
    store.set("merge/comer/1", written)
    with pytest.raises(WireError, match="merge/comer/1"):
        meet(NEW[0], store, 2, 0.1, None, None)


def test_sizes_that_differ_are_told_to_all_at_once() -> None:
    store = HashStore()

    def come(info: GroupInfo, size: int) -> None:
        with pytest.raises(InvalidUsageError, match=r"size is \d on one rank, and \d on rank 0 of group"):
            meet(info, store, size, 30.0, None, None)

    start = time.monotonic()
    together(lambda: come(NEW[0], 2), lambda: come(group("feed", [0])[0], 3))
    in_time(time.monotonic() - start, 5.0)
