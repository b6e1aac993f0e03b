"""Hierarchical algorithms are proved for many layouts of hosts, at world sizes to 64."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.proof.checker import Machine, prove
from support.proof.symbols import BrokenScheduleError
from support.schedule_cases import (
    HIERARCHICAL,
    WORLD_SIZES,
    algorithm_named,
    name_of,
    requests_for,
    schedules_of,
)

from dist2.backends.socket.algorithms.hosts import folding_groups, host_map, layout_of_hosts
from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import Exchange, Fence, Schedule
from dist2.backends.socket.selection import Algorithm
from dist2.operation.kinds import OpKind

ORDERED_BY_MESSAGES = [algorithm_named(OpKind.ALL_REDUCE, name) for name in ("whole", "bruck", "direct")] + [
    algorithm_named(OpKind.REDUCE, "whole"),
    algorithm_named(OpKind.REDUCE, "direct"),
    algorithm_named(OpKind.REDUCE_SCATTER, "direct"),
]
SMALL = [
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 1),
    (0, 1, 1),
    (0, 1, 1, 1, 2),
    (0, 0, 1, 1, 1, 2),
    (0, 1, 1, 0, 2, 2, 2),
]


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from walking a hundred thousand spans again and again."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def requests_on(
    algorithm: Algorithm, layout: tuple[int, ...], size: int, slot: int, root: int = 0
) -> list[Request]:
    return [
        attrs.evolve(
            request,
            layout=layout,
            slot_bytes=slot,
            root=root,
            piece_bytes=slot // 8,
        )
        for request in requests_for(algorithm, len(layout), size)
    ]


def prove_on(
    algorithm: Algorithm, layout: tuple[int, ...], size: int, slot: int, root: int = 0, in_place: bool = False
) -> list[Schedule]:
    requests = requests_on(algorithm, layout, size, slot, root)
    schedules = schedules_of(algorithm, requests)
    prove(requests, schedules, algorithm.ordered, in_place)
    return schedules


@pytest.mark.parametrize("algorithm", HIERARCHICAL + ORDERED_BY_MESSAGES, ids=name_of)
def test_every_algorithm_keeps_its_promise_on_small_layouts(algorithm: Algorithm) -> None:
    for layout, in_place in itertools.product(SMALL, (False, True)):
        world_size = len(layout)
        for size in (0, 1, 4, world_size, 3 * world_size + 1, 97):
            for slot, root in ((8 * world_size, world_size - 1), (1000, 1)):
                prove_on(algorithm, layout, size, slot, root, in_place)


@pytest.mark.parametrize("world_sizes", WORLD_SIZES)
@pytest.mark.parametrize("algorithm", HIERARCHICAL, ids=name_of)
def test_every_algorithm_keeps_its_promise_at_all_world_sizes(
    algorithm: Algorithm, world_sizes: tuple[int, ...]
) -> None:
    """Hosts of equal sizes, ranks distributed one by one, and one host with all ranks but a few."""
    for world_size in (size for size in world_sizes if size > 2):
        hosts = 2 + world_size % min(6, world_size - 2)
        layouts = (
            tuple(rank * hosts // world_size for rank in range(world_size)),
            tuple(rank % hosts for rank in range(world_size)),
            tuple(max(0, rank - world_size + hosts) for rank in range(world_size)),
        )
        turn = layouts[world_size % 3]
        prove_on(algorithm, turn, 2 * world_size + 1, 8 * world_size, world_size // 2, world_size % 2 == 0)


@given(data=st.data())
@settings(max_examples=100)
def test_any_layout_and_size(data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from(HIERARCHICAL + ORDERED_BY_MESSAGES), label="algorithm")
    world_size = data.draw(st.integers(3, 10), label="world size")
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size), label="hosts")
    layout = layout_of_hosts([str(each) for each in drawn])
    if not host_map(layout).is_hierarchical:
        return
    slot = data.draw(st.integers(8 * world_size, 200), label="slot")
    size = data.draw(st.integers(0, 300), label="size")
    root = data.draw(st.integers(0, world_size - 1), label="root")
    prove_on(algorithm, layout, size, slot, root, data.draw(st.booleans(), label="in place"))


def test_operations_that_use_the_slots_in_turn_do_not_race() -> None:
    """Several passes and single ones, on all kinds of hosts, one after the other."""
    for layout in ((0, 0, 1, 1), (0, 1, 1), (0, 1, 0, 1, 2)):
        for first, second in itertools.product(HIERARCHICAL, HIERARCHICAL):
            machine = Machine(len(layout), 8 * len(layout), layout)
            for algorithm, size in ((first, 60), (second, 2), (first, 1), (second, 0), (first, 90)):
                requests = requests_on(algorithm, layout, size, 8 * len(layout), root=1)
                schedules = [
                    attrs.evolve(schedule, slot=8 * len(layout))
                    for schedule in schedules_of(algorithm, requests)
                ]
                machine.run(requests, schedules, algorithm.ordered, in_place=False)
            machine.check_races()


@pytest.mark.parametrize("algorithm", HIERARCHICAL, ids=name_of)
def test_a_schedule_without_its_fences_is_noticed(algorithm: Algorithm) -> None:
    requests = requests_on(algorithm, (0, 0, 1, 1), 60, 32)
    schedules = [
        attrs.evolve(each, steps=tuple(step for step in each.steps if not isinstance(step, Fence)))
        for each in schedules_of(algorithm, requests)
    ]
    with pytest.raises(BrokenScheduleError):
        prove(requests, schedules, algorithm.ordered)


def test_a_slot_on_another_host_is_out_of_reach() -> None:
    one_shot = algorithm_named(OpKind.ALL_REDUCE, "one_shot")
    requests = requests_on(one_shot, (0, 0, 1, 1), 5, 1000)
    with pytest.raises(BrokenScheduleError, match="a slot on another host"):
        prove(requests, schedules_of(one_shot, requests), ordered=True)


def test_memory_lent_on_another_host_is_out_of_reach() -> None:
    mapped = algorithm_named(OpKind.ALL_REDUCE, "mapped")
    requests = requests_on(mapped, (0, 0, 1, 1), 5, 1000)
    with pytest.raises(BrokenScheduleError, match="memory lent on another host"):
        prove(requests, schedules_of(mapped, requests), ordered=True)


def test_sums_in_rank_order_are_not_sums_by_host() -> None:
    whole = algorithm_named(OpKind.ALL_REDUCE, "whole")
    schedules = schedules_of(whole, requests_for(whole, 4, 5))
    with pytest.raises(BrokenScheduleError, match="in rank order"):
        prove(requests_on(whole, (0, 1, 0, 1), 5, 1000), schedules, ordered=True)
    prove(requests_on(whole, (0, 1, 2, 3), 5, 1000), schedules, ordered=True)


def test_the_order_of_folding() -> None:
    assert folding_groups((0, 1, 0, 1), 4) == ((0, 2), (1, 3))
    assert folding_groups((7, 7, 2), 3) == ((0, 1), (2,))
    assert (
        folding_groups((0, 1, 2), 3)
        == folding_groups((0, 0, 0), 3)
        == folding_groups((), 3)
        == ((0,), (1,), (2,))
    )


def crossing(layout: tuple[int, ...], schedules: list[Schedule]) -> list[int]:
    """Return how many elements each host sends to others."""
    sent = [0] * host_map(layout).count
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            if isinstance(step, Exchange):
                sent[layout[rank]] += sum(
                    send.span.numel for send in step.sends if layout[send.peer] != layout[rank]
                )
    return sent


@pytest.mark.parametrize(
    ("family", "name", "layout", "expected"),
    [
        (OpKind.ALL_REDUCE, "hosts_whole", (0, 0, 1, 1), [960, 960]),
        (OpKind.ALL_REDUCE, "hosts_direct", (0, 0, 1, 1), [960, 960]),
        (OpKind.ALL_REDUCE, "hosts_direct", (0, 0, 1, 1, 2, 2), [1280, 1280, 1280]),
        (OpKind.ALL_REDUCE, "hosts_direct", (0, 1, 0, 0, 1), [960, 960]),
        (OpKind.REDUCE, "hosts", (0, 0, 1, 1), [0, 960]),
        (OpKind.BROADCAST, "hosts", (0, 0, 1, 1), [960, 0]),
        (OpKind.BROADCAST, "hosts_tree", (0, 0, 1, 1), [960, 0]),
        (OpKind.BROADCAST, "hosts", (0, 0, 1, 1, 2, 2), [1920, 0, 0]),
    ],
)
def test_the_bytes_between_hosts_are_those_of_one_rank_a_host(
    family: OpKind, name: str, layout: tuple[int, ...], expected: list[int]
) -> None:
    algorithm = algorithm_named(family, name)
    assert crossing(layout, prove_on(algorithm, layout, 960, 480)) == expected


def test_parts_cross_once_for_each_host() -> None:
    layout = (0, 0, 1, 1)
    for family in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER):
        algorithm = algorithm_named(family, "hosts")
        requests = [
            attrs.evolve(each, counts=(10, 20, 30, 40)) for each in requests_on(algorithm, layout, 1, 400)
        ]
        schedules = schedules_of(algorithm, requests)
        prove(requests, schedules, ordered=True)
        assert crossing(layout, schedules) == ([30, 70] if family is OpKind.ALL_GATHER else [70, 30])


@pytest.mark.parametrize(
    ("hosts", "crossings"), [(2, [0, 1]), (3, [0, 1, 1]), (4, [0, 1, 1, 1]), (5, [0, 1, 1, 2, 1])]
)
def test_what_is_short_crosses_once_where_hosts_are_few(hosts: int, crossings: list[int]) -> None:
    layout = tuple(rank // 2 for rank in range(2 * hosts))
    depths = [0] * hosts
    schedules = prove_on(algorithm_named(OpKind.BROADCAST, "hosts_tree"), layout, 8, 400)
    for _ in range(hosts):
        for rank, schedule in enumerate(schedules):
            for step in schedule.steps:
                for send in step.sends if isinstance(step, Exchange) else ():
                    depths[layout[send.peer]] = depths[layout[rank]] + 1
    assert depths == crossings
    for schedule in schedules_of(
        algorithm_named(OpKind.BARRIER, "hosts"),
        requests_on(algorithm_named(OpKind.BARRIER, "hosts"), layout, 1, 400),
    ):
        rounds = sum(isinstance(step, Exchange) for step in schedule.steps)
        assert rounds in (0, 1 if hosts <= 4 else 3)


def test_short_vectors_take_one_message_between_two_hosts() -> None:
    for family, name in (
        (OpKind.ALL_REDUCE, "hosts_whole"),
        (OpKind.REDUCE_SCATTER, "hosts"),
        (OpKind.ALL_GATHER, "hosts"),
    ):
        algorithm = algorithm_named(family, name)
        for schedule in prove_on(algorithm, (0, 0, 1, 1), 8, 400):
            assert sum(isinstance(step, Exchange) for step in schedule.steps) <= 1
