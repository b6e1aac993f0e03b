"""The checker notices: every way to break a schedule that these tests know is found in every algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import pytest
from support.proof.checker import Machine, prove
from support.proof.symbols import BrokenScheduleError
from support.schedule_cases import ALGORITHMS, FLAT, name_of, requests_for, schedules_of, worlds_of

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import (
    Buffer,
    Copy,
    Exchange,
    Fence,
    Fold,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
)
from dist2.backends.socket.algorithms.spans import scratch, source, target
from dist2.backends.socket.selection import Algorithm
from dist2.operation.kinds import OpKind

WORLD_SIZE, SIZE = 5, 11
Schedules = Sequence[Schedule]


def assert_caught(algorithm: Algorithm, requests: Sequence[Request], schedules: Schedules, what: str) -> None:
    """Assert that the checker finds it in place or not in place."""
    for in_place in (False, True):
        try:
            prove(requests, schedules, algorithm.ordered, in_place)
        except BrokenScheduleError:
            return
    pytest.fail(f"{name_of(algorithm)} passes although {what}")


def assert_all_caught(
    algorithm: Algorithm, requests: Sequence[Request], mutants: Sequence[tuple[str, list[Schedule]]]
) -> None:
    """Assert that there are mutants, and that the checker finds each."""
    assert mutants
    for what, schedules in mutants:
        assert_caught(algorithm, requests, schedules, what)


def with_steps(schedules: Schedules, rank: int, steps: Sequence[Step]) -> list[Schedule]:
    changed = list(schedules)
    changed[rank] = attrs.evolve(schedules[rank], steps=tuple(steps))
    return changed


def without_a_step(schedules: Schedules) -> Iterator[tuple[str, list[Schedule]]]:
    for rank, schedule in enumerate(schedules):
        for place, step in enumerate(schedule.steps):
            steps = schedule.steps[:place] + schedule.steps[place + 1 :]
            yield f"rank {rank} lacks {step}", with_steps(schedules, rank, steps)


def without_a_fence(schedules: Schedules) -> Iterator[tuple[str, list[Schedule]]]:
    """Drop the n-th fence of all ranks at once: no rank hangs, but everything may race."""
    fences = sum(isinstance(step, Fence) for step in schedules[0].steps)
    for dropped in range(fences):
        changed = []
        for schedule in schedules:
            places = [place for place, step in enumerate(schedule.steps) if isinstance(step, Fence)]
            steps = schedule.steps[: places[dropped]] + schedule.steps[places[dropped] + 1 :]
            changed.append(attrs.evolve(schedule, steps=steps))
        yield f"fence {dropped} is gone", changed


def with_other_folds(
    schedules: Schedules, change: Callable[[Fold], Fold | None]
) -> Iterator[tuple[str, list[Schedule]]]:
    for rank, schedule in enumerate(schedules):
        for place, step in enumerate(schedule.steps):
            changed = change(step) if isinstance(step, Fold) else None
            if changed is not None:
                steps = [*schedule.steps[:place], changed, *schedule.steps[place + 1 :]]
                yield f"rank {rank} does {changed}", with_steps(schedules, rank, steps)


def with_other_messages(schedules: Schedules) -> Iterator[tuple[str, list[Schedule]]]:
    """Let a send take the elements beside those it should, or go to another rank."""
    for rank, schedule in enumerate(schedules):
        for place, step in enumerate(schedule.steps):
            if not isinstance(step, Exchange) or not step.sends:
                continue
            first, *rest = step.sends
            shorter = attrs.evolve(first.span, stop=first.span.stop - 1)
            misled = Send((first.peer + 1) % len(schedules), first.span)
            for changed in (Send(first.peer, shorter), misled):
                if first.span.numel:
                    exchange = Exchange((changed, *rest), step.recvs)
                    steps = [*schedule.steps[:place], exchange, *schedule.steps[place + 1 :]]
                    yield f"rank {rank} does {changed}", with_steps(schedules, rank, steps)


def swapped(fold: Fold) -> Fold | None:
    return attrs.evolve(fold, srcs=(fold.srcs[1], fold.srcs[0], *fold.srcs[2:]))


def shortened(fold: Fold) -> Fold | None:
    return attrs.evolve(fold, srcs=fold.srcs[:-1])


def doubled(fold: Fold) -> Fold | None:
    return attrs.evolve(fold, srcs=(*fold.srcs[:-1], fold.srcs[0]))


def relabelled(fold: Fold) -> Fold | None:
    return attrs.evolve(fold, final=not fold.final)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_a_dropped_step_is_caught(algorithm: Algorithm) -> None:
    requests = requests_for(algorithm, worlds_of(algorithm, (4, WORLD_SIZE))[-1], SIZE)
    mutants = list(without_a_step(schedules_of(algorithm, requests)))
    assert_all_caught(algorithm, requests, mutants)


@pytest.mark.parametrize("algorithm", FLAT, ids=name_of)
def test_a_removed_fence_is_caught(algorithm: Algorithm) -> None:
    requests = requests_for(algorithm, worlds_of(algorithm, (4, WORLD_SIZE))[-1], SIZE)
    mutants = list(without_a_fence(schedules_of(algorithm, requests)))
    assert_all_caught(algorithm, requests, mutants)


@pytest.mark.parametrize(
    "algorithm", [each for each in ALGORITHMS if "reduce" in each.family.value], ids=name_of
)
def test_wrong_folds_are_caught(algorithm: Algorithm) -> None:
    requests = requests_for(algorithm, worlds_of(algorithm, (4, WORLD_SIZE))[-1], SIZE)
    schedules = schedules_of(algorithm, requests)
    changes = [shortened, doubled, relabelled] + ([swapped] if algorithm.ordered else [])
    for change in changes:
        mutants = list(with_other_folds(schedules, change))
        assert_all_caught(algorithm, requests, mutants)


@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if not each.flat], ids=name_of)
def test_wrong_messages_are_caught(algorithm: Algorithm) -> None:
    requests = requests_for(algorithm, worlds_of(algorithm, (4, WORLD_SIZE))[-1], SIZE)
    for what, broken in with_other_messages(schedules_of(algorithm, requests)):
        assert_caught(algorithm, requests, broken, what)


def test_exact_only_algorithms_are_not_in_order() -> None:
    for algorithm in (each for each in ALGORITHMS if not each.ordered):
        requests = requests_for(algorithm, worlds_of(algorithm, (4, WORLD_SIZE))[-1], SIZE)
        with pytest.raises(BrokenScheduleError, match="in rank order"):
            prove(requests, schedules_of(algorithm, requests), ordered=True)


TWO = [Request(OpKind.ALL_REDUCE, 2, (2,), exact=True)] * 2
SLOT_0, SLOT_1 = (Span(Buffer.SLOT, 0, 2, owner) for owner in (0, 1))


def swap(peer: int) -> Exchange:
    return Exchange((Send(peer, source(0, 2)),), (Recv(peer, scratch(0, 2)),))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Copy(source(0, 2), target(0, 2))], "undefined"),
        ([Copy(source(0, 2), source(0, 2))], "writes"),
        ([Copy(target(0, 1), source(0, 2))], "lengths differ"),
        ([Copy(target(0, 3), source(0, 3))], "leaves its buffer"),
        ([Copy(scratch(0, 2), source(0, 2)), Copy(scratch(1, 3), scratch(0, 2))], "overlap in part"),
        ([Fold(target(0, 2), (source(0, 2), source(0, 2)))], "counts a contribution twice"),
        ([Fold(target(0, 1), (source(0, 1), source(1, 2)))], "different elements"),
        ([Fold(target(0, 2), (source(0, 2),))], "lacks a contribution"),
        ([Exchange(recvs=(Recv(1, scratch(0, 2)),))], "deadlock"),
        ([Fence()], "deadlock"),
        ([Copy(SLOT_1, source(0, 2))], "slot of another"),
        (
            [Exchange((Send(1, target(0, 2)),), (Recv(1, target(1, 2)),))],
            "receives into memory that the step also sends",
        ),
        (
            [Exchange((), (Recv(1, target(0, 2)), Recv(1, target(1, 2))))],
            "receives into memory that the step also sends",
        ),
    ],
)
def test_each_fault_has_its_message(steps: Sequence[Step], message: str) -> None:
    broken = Schedule(tuple(steps), scratch=3, slot=2)
    idle = Schedule((), scratch=3, slot=2)
    with pytest.raises(BrokenScheduleError, match=message):
        prove(TWO, [broken, idle], ordered=False)


def test_crossing_sends_that_wait_for_each_other_are_a_deadlock() -> None:
    def polite(peer: int) -> Schedule:
        sending, receiving = Exchange((Send(peer, source(0, 2)),)), Exchange((), (Recv(peer, scratch(0, 2)),))
        return Schedule((sending, receiving, Fold(target(0, 2), (source(0, 2), scratch(0, 2)))), scratch=2)

    with pytest.raises(BrokenScheduleError, match="deadlock"):
        prove(TWO, [polite(1), polite(0)], ordered=False)


def test_a_rank_order_that_differs_by_rank_is_not_in_order() -> None:
    """Both fold their own first: right for integers, and for two floats only because those commute."""
    schedules = [
        Schedule((swap(1 - rank), Fold(target(0, 2), (source(0, 2), scratch(0, 2)))), scratch=2)
        for rank in range(2)
    ]
    prove(TWO, schedules, ordered=False)
    with pytest.raises(BrokenScheduleError, match="in rank order"):
        prove(TWO, schedules, ordered=True)


def test_folding_twice_is_not_in_order_even_from_left_to_right() -> None:
    """A half-precision partial sum has been rounded."""
    requests = [Request(OpKind.REDUCE, 3, (1,), root=0)] * 3
    root = Schedule(
        (
            Exchange((), (Recv(1, scratch(0, 1)), Recv(2, scratch(1, 2)))),
            Fold(target(0, 1), (source(0, 1), scratch(0, 1)), final=False),
            Fold(target(0, 1), (target(0, 1), scratch(1, 2))),
        ),
        scratch=2,
    )
    schedules = [root, *[Schedule((Exchange((Send(0, source(0, 1)),)),))] * 2]
    prove(requests, schedules, ordered=False)
    with pytest.raises(BrokenScheduleError, match="in rank order"):
        prove(requests, schedules, ordered=True)


def test_ranks_that_disagree_about_the_slot_are_caught() -> None:
    with pytest.raises(BrokenScheduleError, match="disagree"):
        prove(TWO, [Schedule((), slot=1), Schedule((), slot=2)], ordered=False)


def test_stale_slots_of_the_operation_before_are_no_contribution() -> None:
    """Without its copy an operation would fold the previous operation's data in the slots."""
    schedules = [
        Schedule((Copy(own, source(0, 2)), Fence(), Fold(target(0, 2), (SLOT_0, SLOT_1))), slot=2)
        for own in (SLOT_0, SLOT_1)
    ]
    machine = Machine(2, 2)
    machine.run(TWO, schedules, ordered=True, in_place=False)
    machine.run(TWO, schedules, ordered=True, in_place=False)
    forgetful = [attrs.evolve(each, steps=each.steps[1:]) for each in schedules]
    with pytest.raises(BrokenScheduleError, match="is result"):
        machine.run(TWO, forgetful, ordered=True, in_place=False)


def waiting_for_nobody(schedules: Schedules) -> Iterator[tuple[str, list[Schedule]]]:
    for rank, schedule in enumerate(schedules):
        for place, step in enumerate(schedule.steps):
            moves = len(schedule.steps) > place + 1  # else nothing is read behind the fence
            if isinstance(step, Fence) and step.awaited != () and moves:
                steps = (*schedule.steps[:place], Fence(awaited=()), *schedule.steps[place + 1 :])
                yield f"rank {rank} waits for nobody in step {place}", with_steps(schedules, rank, steps)


@pytest.mark.parametrize("algorithm", [each for each in FLAT if each.streams], ids=name_of)
def test_a_rank_that_does_not_wait_for_what_it_reads_is_caught(algorithm: Algorithm) -> None:
    requests = requests_for(algorithm, WORLD_SIZE, SIZE)
    mutants = list(waiting_for_nobody(schedules_of(algorithm, requests)))
    assert_all_caught(algorithm, requests, mutants)


def test_a_half_of_the_slots_is_no_place_for_who_does_not_wait() -> None:
    """On pieces these do not race; with two alternating slots the root overwrites data that others may still
    read."""
    broadcast = next(each for each in FLAT if each.streams and each.family is OpKind.BROADCAST)
    requests = requests_for(broadcast, 3, 4)
    for streams, races in ((True, False), (False, True)):
        schedules = [attrs.evolve(each, streams=streams) for each in schedules_of(broadcast, requests)]
        machine = Machine(3, slot=4)
        for _ in range(5):
            machine.run(requests, schedules, ordered=True, in_place=False)
        if not races:
            machine.check_races()
            continue
        with pytest.raises(BrokenScheduleError, match="race"):
            machine.check_races()
