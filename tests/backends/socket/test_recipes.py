"""Recipes: equal groups reuse the steps computed for a call, other groups do not."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket import recipes as module
from dist2.backends.socket.recipes import Likeness, Recipes, recipes_of
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES
from dist2.errors import InvalidUsageError
from dist2.operation.kinds import SUM, OpKind, ReduceKind, Reduction
from dist2.operation.signature import GroupInfo, Signature, TensorMeta

FOUR = Likeness(rank=1, world_size=4, slot_bytes=SLOT_BYTES)


def signature(
    group: str,
    kind: OpKind = OpKind.ALL_REDUCE,
    numel: int = 2,
    dtype: torch.dtype = torch.float32,
    reduction: Reduction | None = SUM,
    root: int | None = None,
) -> Signature:
    info = GroupInfo(group, group, "", "socket", 1, (0, 1, 2, 3))
    metas = (TensorMeta((numel,), dtype),)
    return Signature(kind, info, metas, metas, reduction=reduction, root=root)


def test_alike_groups_share_what_was_worked_out() -> None:
    mine, others = recipes_of(FOUR), recipes_of(attrs.evolve(FOUR))
    found = mine.find(signature("first"))
    assert others.find(signature("second")) is found
    assert found.plan is not None


@pytest.mark.parametrize(
    "other",
    [
        attrs.evolve(FOUR, rank=2),
        attrs.evolve(FOUR, world_size=5),
        attrs.evolve(FOUR, slot_bytes=0),
        attrs.evolve(FOUR, deterministic=False),
        attrs.evolve(FOUR, algorithm="two_shot"),
        attrs.evolve(FOUR, thresholds=FOUR.thresholds.changed({"crowd": 3})),
    ],
)
def test_groups_that_differ_share_nothing(other: Likeness) -> None:
    assert recipes_of(other) is not recipes_of(FOUR)
    assert recipes_of(other).find(signature("group")) is not recipes_of(FOUR).find(signature("group"))


def test_calls_that_differ_have_recipes_of_their_own() -> None:
    recipes = Recipes(FOUR)
    premultiplied = [Reduction(ReduceKind.PREMUL_SUM, factor) for factor in (2.0, 3.0)]
    calls = [
        signature("group"),
        signature("group", numel=3),
        signature("group", dtype=torch.int32),
        *(signature("group", reduction=each) for each in premultiplied),
        signature("group", OpKind.REDUCE, root=0),
        signature("group", OpKind.REDUCE, root=1),
        signature("group", OpKind.BROADCAST, reduction=None, root=1),
    ]
    assert len({id(recipes.find(call)) for call in calls}) == len(calls)


def test_what_is_refused_once_is_refused_again() -> None:
    recipes = Recipes(attrs.evolve(FOUR, algorithm="no_such"))
    for _ in range(2):
        with pytest.raises(InvalidUsageError, match="no_such"):
            recipes.find(signature("group"))
    for _ in range(2):
        with pytest.raises(InvalidUsageError, match="float32"):
            Recipes(FOUR).find(signature("group", reduction=Reduction(ReduceKind.BAND)))


def test_shapes_that_change_all_the_time_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    recipes = Recipes(FOUR)
    first = recipes.find(signature("group", numel=1))
    for numel in (2, 3, 4):
        recipes.find(signature("group", numel=numel))
    assert len(recipes) <= 3
    assert recipes.find(signature("group", numel=1)) is not first


@pytest.mark.parametrize("layout", [(0, 0, 0), (0, 0, 1)])
def test_a_group_of_the_same_members_goes_by_its_parents_recipes(layout: tuple[int, ...]) -> None:
    """A group of other members, or with another order, has its own recipes."""

    def body(pg: ProcessGroup) -> None:
        same, reversed_order = pg.split([0, 1, 2]), pg.split([2, 1, 0])
        assert same is not None
        assert reversed_order is not None
        own: Any = pg.backend
        like: Any = same.backend
        other: Any = reversed_order.backend
        assert like._programs.recipes is own._programs.recipes
        assert like.layout == own.layout
        likeness = other._programs.recipes._likeness
        assert likeness.rank == 2 - pg.rank()
        assert likeness.layout == other.layout
        for group in (same, reversed_order):
            tensor = torch.full((3,), float(group.rank()))
            group.all_reduce(tensor)
            assert tensor.tolist() == [3.0] * 3
            group.shutdown()

    run_ranks(3, body, Tenant("here", "socket", layout=layout))


@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.ALL_GATHER_SINGLE])
def test_blocks_that_are_alike_are_one_loop(kind: OpKind) -> None:
    """So a plan is as short for a gigabyte as for some blocks."""
    likeness = attrs.evolve(FOUR, thresholds=FOUR.thresholds.mapped_from(1 << 60))

    def steps(blocks: int, numel: int = 0) -> int:
        reduction, root = (SUM, None) if kind is OpKind.ALL_REDUCE else (None, 0)
        call = signature("group", kind, 4 * (blocks << 18) + 4 * numel, reduction=reduction, root=root)
        if kind is OpKind.ALL_GATHER_SINGLE:
            inputs = (TensorMeta((call.outputs[0].numel // 4,), torch.float32),)
            call = attrs.evolve(call, inputs=inputs, root=None)
        return len(Recipes(likeness).find(call).plan)

    assert steps(3) == steps(4) == steps(1024)
    assert steps(3) < steps(3, numel=5) == steps(1024, numel=5)
