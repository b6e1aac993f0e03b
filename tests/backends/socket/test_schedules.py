"""Every algorithm is proved for world sizes to 64, and no two operations on alternating slot halves race."""

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
    ALGORITHMS,
    FLAT,
    WORLD_SIZES,
    algorithm_named,
    name_of,
    requests_for,
    schedules_of,
    worlds_of,
)

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Exchange, Fence, Fold, Schedule, Span
from dist2.backends.socket.selection import Algorithm
from dist2.operation.kinds import OpKind

LENDS = [each for each in FLAT if each.lends]
MANY = 16  # up to here all lengths, beyond it they take turns


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from walking a hundred thousand spans again and again."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def prove_algorithm(algorithm: Algorithm, world_size: int, size: int, in_place: bool) -> None:
    requests = requests_for(algorithm, world_size, size)
    prove(requests, schedules_of(algorithm, requests), algorithm.ordered, in_place)


def sizes_for(world_size: int) -> list[tuple[int, bool]]:
    """Return lengths around the world size, each in place and not; for many ranks they take turns."""
    around = (world_size - 1, world_size, world_size + 1)
    if world_size <= MANY:
        return list(itertools.product(sorted({0, 1, *around}), (False, True)))
    turn = (around[world_size % 3], world_size // 3 % 2 == 0)
    return [(0, False), (1, True), turn]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("world_sizes", WORLD_SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_every_algorithm_keeps_its_promise_at_all_world_sizes(
    algorithm: Algorithm, world_sizes: tuple[int, ...]
) -> None:
    is_uneven = algorithm.family not in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BROADCAST)
    for world_size in worlds_of(algorithm, world_sizes):
        sizes = sizes_for(world_size)
        # Parts that differ by rank hold all cases at once: two patterns are enough of them.
        for size, in_place in sizes[-2:] if is_uneven else sizes:
            prove_algorithm(algorithm, world_size, size, in_place)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_every_root_works(algorithm: Algorithm) -> None:
    for world_size in worlds_of(algorithm, (2, 3, 5, 8)):
        for root in range(world_size):
            requests = [
                attrs.evolve(request, root=root) for request in requests_for(algorithm, world_size, 7)
            ]
            prove(requests, schedules_of(algorithm, requests), algorithm.ordered, in_place=root % 2 == 0)


@pytest.mark.parametrize("number", range(len(FLAT)), ids=lambda number: name_of(FLAT[number]))
@pytest.mark.parametrize("all_triples", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_operations_that_use_the_slots_in_turn_do_not_race(number: int, all_triples: bool) -> None:
    """The slot of the first is used again by the third: the second must keep them apart.

    A third for each first and second is enough for all pairs of neighbours, and of a first and a third.
    """
    first = FLAT[number]
    for turn, second in enumerate(FLAT):
        for third in FLAT if all_triples else [FLAT[(number + turn) % len(FLAT)]]:
            machine = Machine(3, slot=50)
            for algorithm, size in ((first, 2), (second, 1), (third, 4), (first, 0), (second, 14)):
                requests = requests_for(algorithm, 3, size)
                machine.run(requests, schedules_of(algorithm, requests), algorithm.ordered, in_place=False)
            machine.check_races()


def test_messages_between_do_not_count_as_a_turn() -> None:
    machine = Machine(3, slot=50)
    for name in ("one_shot", "direct", "two_shot", "ring", "one_shot"):
        algorithm = algorithm_named(OpKind.ALL_REDUCE, name)
        requests = requests_for(algorithm, 3, 8)
        machine.run(requests, schedules_of(algorithm, requests), algorithm.ordered, in_place=False)
    machine.check_races()


def test_an_operation_without_a_fence_would_let_its_neighbours_race() -> None:
    one_shot = algorithm_named(OpKind.ALL_REDUCE, "one_shot")
    requests = requests_for(one_shot, 3, 4)
    idle = [Schedule((), slot=4)] * 3
    nothing = [Request(OpKind.BROADCAST, 3, (0,))] * 3
    machine = Machine(3, slot=4)
    machine.run(requests, schedules_of(one_shot, requests), ordered=True, in_place=False)
    machine.run(nothing, idle, ordered=True, in_place=False)
    machine.run(requests, schedules_of(one_shot, requests), ordered=True, in_place=False)
    with pytest.raises(BrokenScheduleError, match="race"):
        machine.check_races()


@pytest.mark.parametrize("algorithm", FLAT, ids=name_of)
def test_flat_algorithms_always_fence_and_send_nothing(algorithm: Algorithm) -> None:
    for size in (0, 1, 5, 40):
        for schedule in schedules_of(algorithm, requests_for(algorithm, 4, size)):
            assert any(isinstance(step, Fence) for step in schedule.steps)
            assert not any(isinstance(step, Exchange) for step in schedule.steps)


def test_a_single_rank_copies_and_no_more() -> None:
    for algorithm in ALGORITHMS:
        (schedule,) = schedules_of(algorithm, requests_for(algorithm, 1, 3))
        assert all(isinstance(step, Copy) for step in schedule.steps), name_of(algorithm)
        assert schedule.slot == 0


def test_ordered_algorithms_fold_each_element_once() -> None:
    for algorithm in (each for each in ALGORITHMS if each.ordered):
        for schedule in schedules_of(algorithm, requests_for(algorithm, 6, 13)):
            folds = [step for step in schedule.steps if isinstance(step, Fold)]
            assert all(step.final and len(step.srcs) == 6 for step in folds), name_of(algorithm)


def bytes_sent(algorithm: Algorithm, world_size: int, size: int) -> int:
    """Return the most elements that a rank sends."""
    schedules = schedules_of(algorithm, requests_for(algorithm, world_size, size))
    return max(
        sum(send.span.numel for step in each.steps if isinstance(step, Exchange) for send in step.sends)
        for each in schedules
    )


def rounds_taken(algorithm: Algorithm, world_size: int, size: int) -> int:
    schedules = schedules_of(algorithm, requests_for(algorithm, world_size, size))
    return max(sum(isinstance(step, Exchange) for step in each.steps) for each in schedules)


@pytest.mark.parametrize(
    ("family", "name", "exchanges", "elements"),
    [
        (OpKind.ALL_REDUCE, "ring", 14, 2 * 7 * 10),
        (OpKind.ALL_REDUCE, "direct", 2, 2 * 7 * 10),
        (OpKind.ALL_REDUCE, "halving", 6, 2 * 7 * 10),
        (OpKind.ALL_REDUCE, "doubling", 3, 3 * 80),
        (OpKind.ALL_REDUCE, "whole", 1, 7 * 80),
        (OpKind.ALL_REDUCE, "bruck", 3, 7 * 80),
        (OpKind.REDUCE, "whole", 1, 80),
        (OpKind.BROADCAST, "binomial", 3, 3 * 80),
        (OpKind.BARRIER, "dissemination", 3, 0),
    ],
)
def test_costs_are_those_of_the_theory(family: OpKind, name: str, exchanges: int, elements: int) -> None:
    """At 8 ranks and 80 elements; `docs/algorithms.md` has the formulas."""
    algorithm = algorithm_named(family, name)
    assert bytes_sent(algorithm, 8, 80) == elements
    taken = rounds_taken(algorithm, 8, 80)
    assert taken == exchanges or (name == "binomial" and taken <= exchanges)


def test_a_slot_span_knows_its_owner() -> None:
    one_shot = algorithm_named(OpKind.ALL_REDUCE, "one_shot")
    first = schedules_of(one_shot, requests_for(one_shot, 2, 3))[1].steps[0]
    assert first == Copy(Span(Buffer.SLOT, 0, 3, owner=1), Span(Buffer.INPUT, 0, 3))


@pytest.mark.parametrize("family", [OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER])
def test_long_direct_reductions_take_passes_with_bounded_scratch(family: OpKind) -> None:
    direct = algorithm_named(family, "direct")
    for world_size, size, limit in ((2, 9, 2), (3, 40, 7), (5, 23, 5), (8, 50, 8)):
        requests = [
            attrs.evolve(request, scratch_bytes=limit, counts=tuple(7 * count for count in request.counts))
            for request in requests_for(direct, world_size, size)
        ]
        schedules = schedules_of(direct, requests)
        assert all(schedule.scratch <= limit + world_size for schedule in schedules)
        assert max(sum(isinstance(step, Fold) for step in each.steps) for each in schedules) > 1
        for in_place in (False, True):
            prove(requests, schedules, ordered=True, in_place=in_place)


@pytest.mark.parametrize("algorithm", LENDS, ids=name_of)
def test_nobody_writes_the_memory_of_another(algorithm: Algorithm) -> None:
    """A rank may be stopped before it writes, until the call of the memory's owner has raised."""
    for world_size, size in itertools.product((2, 3, 8), (1, 31)):
        for schedule in schedules_of(algorithm, requests_for(algorithm, world_size, size)):
            written = [step.dst for step in schedule.steps if isinstance(step, (Copy, Fold))]
            assert not any(span.buffer is Buffer.LENT for span in written)


def test_a_schedule_that_writes_the_memory_of_another_is_noticed() -> None:
    lending = algorithm_named(OpKind.BROADCAST, "mapped")
    requests = [Request(OpKind.BROADCAST, 2, (4,), slot_bytes=99)] * 2
    theirs, own = Span(Buffer.LENT, 0, 4, owner=1), Span(Buffer.INPUT, 0, 4)
    pushes = Schedule((Fence(), Copy(theirs, own), Copy(Span(Buffer.OUTPUT, 0, 4), own), Fence()))
    waits = Schedule((Fence(), Fence()), lends=Buffer.OUTPUT)
    prove(requests, schedules_of(lending, requests), ordered=True)
    with pytest.raises(BrokenScheduleError, match="writes the memory of another"):
        prove(requests, [pushes, waits], ordered=True)


@pytest.mark.parametrize(
    ("family", "hurries"), [(OpKind.BROADCAST, 2), (OpKind.GATHER, 1), (OpKind.SCATTER, 2)]
)
def test_who_has_lent_must_wait_for_those_that_use_it(family: OpKind, hurries: int) -> None:
    """The wait is at the last fence."""
    lending = algorithm_named(family, "mapped")
    counts = (31,) if family is OpKind.BROADCAST else (31,) * 4
    requests = [Request(family, 4, counts, root=2, slot_bytes=999)] * 4
    schedules = schedules_of(lending, requests)
    prove(requests, schedules, ordered=True)
    lender = schedules[hurries]
    assert lender.lends is not None
    schedules[hurries] = attrs.evolve(lender, steps=(*lender.steps[:-1], Fence(awaited=())))
    with pytest.raises(BrokenScheduleError, match="race"):
        prove(requests, schedules, ordered=True)


@given(data=st.data())
@settings(max_examples=150)
def test_any_sizes_at_any_root(data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from(ALGORITHMS), label="algorithm")
    world_size = data.draw(st.sampled_from(worlds_of(algorithm, range(1, 13))), label="world size")
    sizes = st.integers(0, 9)
    asked = Request(
        algorithm.family,
        world_size,
        (data.draw(st.integers(0, 60), label="numel"),),
        root=data.draw(st.integers(0, world_size - 1), label="root"),
        exact=not algorithm.ordered,
        slot_bytes=1000,
        scratch_bytes=data.draw(st.integers(1, 60), label="scratch"),
    )
    requests = [asked] * world_size
    if algorithm.family is OpKind.ALL_TO_ALL:
        rows = st.lists(sizes, min_size=world_size, max_size=world_size)
        matrix = data.draw(st.lists(rows, min_size=world_size, max_size=world_size), label="matrix")
        requests = [
            attrs.evolve(asked, counts=tuple(matrix[rank]), received=tuple(row[rank] for row in matrix))
            for rank in range(world_size)
        ]
    elif len(requests_for(algorithm, 2, 1)[0].counts) == 2:
        counts = data.draw(st.lists(sizes, min_size=world_size, max_size=world_size), label="counts")
        requests = [attrs.evolve(asked, counts=tuple(counts))] * world_size
    prove(
        requests,
        schedules_of(algorithm, requests),
        algorithm.ordered,
        data.draw(st.booleans(), label="in place"),
    )
