"""The choice of algorithms: always a suitable one, the same on all ranks, and the forced one or an error."""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.proof.checker import prove
from support.schedule_cases import ALGORITHMS, FAMILIES, name_of, requests_for, schedules_of

from dist2.backends.socket.algorithms.request import family_of
from dist2.backends.socket.selection import Algorithm, Request, Thresholds, algorithms_for, select
from dist2.backends.socket.tuning import CROWDS, MAPPED
from dist2.errors import InvalidUsageError
from dist2.operation.kinds import OpKind

MIB = 1 << 20
VECTORS = (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BROADCAST)


def request(kind: OpKind, world_size: int, nbytes: int, **changes: object) -> Request:
    """Ask for float32 operations of so many bytes in all."""
    family, numel = family_of(kind), nbytes // 4
    counts = (numel,) if family in VECTORS else (numel // world_size,) * world_size
    plain = Request(kind, world_size, counts, itemsize=4, received=counts)
    return attrs.evolve(plain, **changes)


def chosen(kind: OpKind, world_size: int, nbytes: int, **changes: object) -> str:
    return select(request(kind, world_size, nbytes, **changes)).name


@given(
    kind=st.sampled_from([kind for kind in OpKind if not kind.is_p2p]),
    world_size=st.integers(1, 300),
    nbytes=st.integers(0, 1 << 30),
    slot_bytes=st.sampled_from([0, 64, MIB]),
    exact=st.booleans(),
    deterministic=st.booleans(),
)
@settings(max_examples=300)
def test_the_choice_always_fits(
    kind: OpKind, world_size: int, nbytes: int, slot_bytes: int, exact: bool, deterministic: bool
) -> None:
    asked = request(kind, world_size, nbytes, slot_bytes=slot_bytes, exact=exact, deterministic=deterministic)
    algorithm = select(asked)
    assert algorithm in algorithms_for(kind)
    assert algorithm.fits(asked)
    assert algorithm.flat == (slot_bytes >= 4 * world_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_chosen_keeps_its_promise(family: OpKind) -> None:
    limits = Thresholds(
        **(dict.fromkeys(MAPPED, (12,) * len(CROWDS)) | {"all_reduce_mapped_bytes": (8, 8, 27, 27)}),
        one_shot_bytes=(4, 2, 1, 1),
        one_shot_reduce_bytes=(4, 2, 1, 1),
        whole_bytes=30,
        whole_reduce_bytes=30,
        doubling_bytes=5,
        tree_bytes=20,
        short_bytes=10,
        crowd=4,
    )
    seen = set()
    worlds, sizes = (2, 3, 4, 6, 8, 9), (1, 7, 40)
    for world_size, size, exact, slots in itertools.product(worlds, sizes, (0, 1), (0, 1, "hosts")):
        asked = requests_for(algorithms_for(family)[0], world_size, size)
        asked = [
            attrs.evolve(
                each,
                exact=bool(exact),
                slot_bytes=each.slot_bytes if slots else 0,
                layout=tuple(min(rank // 2, 2) for rank in range(world_size)) if slots == "hosts" else (),
                itemsize=1,
            )
            for each in asked
        ]
        (algorithm,) = {select(each, limits) for each in asked}
        seen.add(algorithm.name)
        prove(asked, schedules_of(algorithm, asked), ordered=not asked[0].any_order)
    unused = {each.name for each in algorithms_for(family)} - seen
    assert not unused, f"no size chooses {unused}"


def test_short_and_long_and_many() -> None:
    slots = {"slot_bytes": MIB}
    assert chosen(OpKind.ALL_REDUCE, 2, 8, **slots) == "one_shot"
    assert chosen(OpKind.ALL_REDUCE, 2, 16 << 10, lends=False, **slots) == "one_shot"
    assert chosen(OpKind.ALL_REDUCE, 2, 17 << 10, lends=False, **slots) == "two_shot"
    assert chosen(OpKind.ALL_REDUCE, 4, 400 << 10, lends=False, **slots) == "two_shot"
    assert chosen(OpKind.ALL_REDUCE, 2, 200 << 10, **slots) == "mapped"
    assert chosen(OpKind.ALL_TO_ALL, 2, 200 << 10, **slots) == "mapped"
    assert chosen(OpKind.ALL_TO_ALL, 2, 8 << 10, **slots) == "flat"
    assert chosen(OpKind.ALL_REDUCE, 2, 64 * MIB, **slots) == "mapped"
    assert chosen(OpKind.ALL_REDUCE, 2, 64 * MIB, lends=False, **slots) == "two_shot"
    assert chosen(OpKind.ALL_REDUCE, 4, 8) == "whole"
    assert chosen(OpKind.ALL_REDUCE, 4, 8, exact=True) == "doubling"
    assert chosen(OpKind.ALL_REDUCE, 3, 8, exact=True) == "whole"
    assert chosen(OpKind.ALL_REDUCE, 64, 8) == "bruck"
    assert chosen(OpKind.ALL_REDUCE, 64, 8, exact=True) == "doubling"
    assert chosen(OpKind.ALL_REDUCE, 4, 64 * MIB) == "direct"
    assert chosen(OpKind.ALL_REDUCE, 64, 64 * MIB) == "direct"
    assert chosen(OpKind.ALL_REDUCE, 64, 64 * MIB, deterministic=False) == "halving"
    assert chosen(OpKind.ALL_REDUCE, 63, 64 * MIB, deterministic=False) == "ring"
    assert chosen(OpKind.ALL_REDUCE, 63, 8, exact=True) == "bruck"
    assert chosen(OpKind.BROADCAST, 8, 8) == "binomial"
    assert chosen(OpKind.BROADCAST, 8, 64 * MIB) == "van_de_geijn"
    assert chosen(OpKind.BARRIER, 8, 0) == "dissemination"


def test_inexact_reductions_never_take_what_folds_in_any_order() -> None:
    for kind, world_size, nbytes in itertools.product(
        (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER), (3, 17, 64), (8, 1 << 15, MIB, 1 << 26)
    ):
        assert select(request(kind, world_size, nbytes)).ordered


def test_the_order_of_two_does_not_matter() -> None:
    """Sums and products of two commute, so every algorithm folds two ranks in rank order."""
    for name in ("ring", "doubling", "halving"):
        assert chosen(OpKind.ALL_REDUCE, 2, MIB, forced=name) == name


def test_all_to_all_chooses_without_looking_at_sizes() -> None:
    """Each rank knows its own sizes only, and all must choose alike."""
    for world_size in (2, 16, 17, 64):
        names = {chosen(OpKind.ALL_TO_ALL, world_size, nbytes) for nbytes in (0, 8 * world_size, 1 << 28)}
        assert len(names) == 1
    slots = {"slot_bytes": MIB}
    for layout, name in (
        ((0, 0, 1, 1), "direct"),
        ((0, 1, 2, 3), "direct"),
        ((0,) * 9 + (1,) * 8, "pairwise"),
    ):
        asked = [
            request(OpKind.ALL_TO_ALL, len(layout), nbytes, layout=layout, **slots)
            for nbytes in (0, 64, 1 << 28)
        ]
        assert {select(each).name for each in asked} == {name}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_every_algorithm_can_be_forced(algorithm: Algorithm) -> None:
    for asked in requests_for(algorithm, 4, 9):
        assert select(attrs.evolve(asked, forced=algorithm.name)) is algorithm


def test_an_unknown_name_lists_the_fit_ones() -> None:
    with pytest.raises(InvalidUsageError) as caught:
        chosen(OpKind.ALL_REDUCE, 4, 64, forced="tree")
    message = str(caught.value)
    assert "'tree' is unknown for all_reduce" in message
    assert "whole, bruck, direct" in message
    assert "ring" not in message
    assert "one_shot" not in message


def test_an_unfit_name_lists_the_fit_ones() -> None:
    with pytest.raises(InvalidUsageError, match="'ring' does not fit for all_reduce; suitable: whole, bruck"):
        chosen(OpKind.ALL_REDUCE, 4, 64, forced="ring")
    with pytest.raises(InvalidUsageError, match="'one_shot' does not fit"):
        chosen(OpKind.ALL_REDUCE, 4, 64, forced="one_shot")
    assert chosen(OpKind.ALL_REDUCE, 4, 64, forced="ring", deterministic=False) == "ring"
    with pytest.raises(InvalidUsageError, match="'halving' does not fit for all_reduce; suitable: whole"):
        chosen(OpKind.ALL_REDUCE, 6, 64, forced="halving", exact=True)


def test_slots_too_small_for_a_part_of_each_rank_are_none() -> None:
    assert chosen(OpKind.REDUCE_SCATTER, 8, 64, slot_bytes=31) == "direct"
    assert chosen(OpKind.REDUCE_SCATTER, 8, 64, slot_bytes=32) == "flat"


def test_names_are_unique_in_a_family_and_spellings_share_them() -> None:
    for family in FAMILIES:
        names = [algorithm.name for algorithm in algorithms_for(family)]
        assert len(set(names)) == len(names)
    for kind in OpKind:
        if not kind.is_p2p:
            assert algorithms_for(kind) == algorithms_for(family_of(kind)) != ()


@pytest.mark.parametrize("family", [each for each in FAMILIES if each is not OpKind.BARRIER])
def test_each_operation_looks_for_mapped_tensors_from_its_own_size_on(family: OpKind) -> None:
    row = (1000, 8064, 64_000, 70_400)
    limits = Thresholds().mapped_from(1 << 40).changed({f"{family.value}_mapped_bytes": row})
    for world_size, nbytes in ((2, 1000), (3, 8064), (4, 8064), (8, 64_000), (16, 70_400), (20, 70_400)):
        names = [
            select(request(family, world_size, size, slot_bytes=MIB), limits).name
            for size in (nbytes - 4 * world_size, nbytes, 64 * MIB)
        ]
        assert names[0] != "mapped" == names[1] == names[2]
        others = [
            select(request(each, world_size, nbytes, slot_bytes=MIB), limits).name
            for each in FAMILIES
            if each is not family
        ]
        assert "mapped" not in others


def test_no_tensors_are_mapped_where_a_table_has_no_room_for_a_part_of_each_rank() -> None:
    for ranks, found in ((256, "mapped"), (314, "flat")):
        asked = request(OpKind.ALL_TO_ALL, ranks, 64 * MIB, slot_bytes=MIB)
        assert select(asked).name == found


def test_no_tensors_are_mapped_between_hosts_or_where_lending_is_off() -> None:
    limits = Thresholds().mapped_from(0)
    for family in FAMILIES:
        asked = request(family, 4, MIB, slot_bytes=MIB)
        for other in (
            attrs.evolve(asked, layout=(0, 0, 1, 1)),
            attrs.evolve(asked, lends=False),
            attrs.evolve(asked, slot_bytes=0),
        ):
            assert select(other, limits).name != "mapped"
