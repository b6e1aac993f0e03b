"""Which plans of the core are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.boards import Members
from support.scripts import NotingHost, tensor

from dist2.backends.socket.lowering import FILL
from dist2.backends.socket.overlap import MAPPED, SLOT
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import ALL, HEADER_WORDS, NOBODY, TABLE_BYTES
from dist2.backends.socket.transport.boards.pieces import HALVES, LONGER, PIECE_BYTES, TINY, TINY_BYTES
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES
from dist2.operation.engine import FOLD_NAMES, Plan, Script

RANK, OTHER = 1, 2
INPUT, OUTPUT = 0, 1  # of a plan with one of each, of 100 bytes


@pytest.fixture
def board() -> Iterator[Board]:
    """The board of a group of one."""
    made = Members(1)
    yield made.boards[0]
    made.close()


def small_plan() -> Any:
    return Plan(RANK, [100], [100])


Adding = Callable[[Any], object]
INSIDE = "reads outside of the memory it was given"
OWN = "writes outside of the rank's own memory"


@pytest.mark.parametrize(
    ("add", "complaint"),
    [
        (lambda plan: plan.copy(tensor(OUTPUT, 1), tensor(INPUT), 100), OWN),
        (lambda plan: plan.copy(tensor(OUTPUT, 101), tensor(INPUT), 0), OWN),
        (lambda plan: plan.copy(tensor(OUTPUT, (1 << 64) - 1), tensor(INPUT), 2), OWN),
        (lambda plan: plan.copy(tensor(OUTPUT), tensor(INPUT), (1 << 64) - 1), OWN),
        (lambda plan: plan.copy(tensor(2), tensor(INPUT), 1), OWN),
        (lambda plan: plan.copy(tensor(-1), tensor(INPUT), 1), OWN),
        (lambda plan: plan.copy(tensor(INPUT), tensor(OUTPUT), 1), OWN),
        (lambda plan: plan.copy(tensor(OUTPUT), tensor(INPUT, 1), 100), INSIDE),
        (lambda plan: plan.copy(tensor(OUTPUT), tensor(2), 1), INSIDE),
        (lambda plan: plan.copy(tensor(OUTPUT), tensor(-1), 1), INSIDE),
        (lambda plan: plan.fold(0, 1.0, tensor(OUTPUT, 4), [tensor(INPUT)], 100), OWN),
        (lambda plan: plan.fold(0, 1.0, tensor(INPUT), [tensor(INPUT)], 4), OWN),
        (lambda plan: plan.fold(0, 1.0, tensor(OUTPUT), [tensor(INPUT), tensor(INPUT, 4)], 100), INSIDE),
        (lambda plan: plan.fold(0, 1.0, tensor(OUTPUT), [], 4), "has no such fold"),
        (lambda plan: plan.fold(-1, 1.0, tensor(OUTPUT), [tensor(INPUT)], 4), "has no such fold"),
        (lambda plan: plan.fold(len(FOLD_NAMES), 1.0, tensor(OUTPUT), [tensor(INPUT)], 4), "no such fold"),
        (lambda plan: plan.fold_elsewhere(tensor(INPUT), [tensor(OUTPUT)], 4, None), OWN),
        (lambda plan: plan.fold_elsewhere(tensor(OUTPUT), [tensor(INPUT, 97)], 4, None), INSIDE),
        (lambda plan: plan.fence(ALL, (tensor(INPUT), tensor(OUTPUT), 4)), OWN),
        (lambda plan: plan.fence(ALL, (tensor(OUTPUT), tensor(INPUT, 97), 4)), INSIDE),
        (lambda plan: plan.claim(HALVES + 1), "claims pieces of no kind"),
        (lambda plan: plan.expect_shared([tensor(2)]), "exposes what is in no tensor"),
        (lambda plan: plan.expect_shared([(SLOT, RANK, 0)]), "exposes what is in no tensor"),
        (lambda plan: plan.offer([tensor(INPUT), tensor(OUTPUT, 101)]), "exposes what is in no tensor"),
        (lambda plan: plan.offer([tensor(INPUT)] * (TABLE_BYTES // 8 - HEADER_WORDS + 1)), "too many parts"),
        (lambda plan: plan.copy(tensor(OUTPUT), (MAPPED, 0, 0), 4), INSIDE),  # nothing was taken
        (lambda plan: plan.take([(OTHER, 0)], None), "exposed with no fence of all"),
        (lambda plan: plan.noted(7, None), "published with no fence of all"),
    ],
)
def test_steps_outside_of_the_memory_that_they_were_given_are_refused(add: Adding, complaint: str) -> None:
    plan = small_plan()
    plan.copy(tensor(OUTPUT), tensor(INPUT), 100)
    add(plan)
    with pytest.raises(ValueError, match=rf"^step 1 of the plan .*{complaint}"):
        plan.seal()


@pytest.mark.parametrize(
    ("kind", "nbytes"), [(TINY, TINY_BYTES), (LONGER, PIECE_BYTES), (HALVES, SLOT_BYTES)]
)
def test_steps_stay_inside_the_part_of_a_slot_that_was_claimed(kind: int, nbytes: int) -> None:
    def claimed() -> Any:
        plan = Plan(RANK, [nbytes + 1], [nbytes + 1])
        plan.claim(kind)
        return plan

    own, theirs = (SLOT, RANK, 0), (SLOT, OTHER, 0)
    plan = claimed()
    plan.copy(own, tensor(INPUT), nbytes, FILL)
    plan.copy(tensor(OUTPUT), theirs, nbytes)
    plan.copy((SLOT, RANK, nbytes - 1), tensor(INPUT), 1)
    plan.seal()
    for dst, src, length in (
        (own, tensor(INPUT), nbytes + 1),
        ((SLOT, RANK, nbytes), tensor(INPUT), 1),
        ((SLOT, RANK, (1 << 64) - 1), tensor(INPUT), 2),
        (theirs, tensor(INPUT), 1),
        (tensor(OUTPUT), theirs, nbytes + 1),
        (tensor(OUTPUT), (SLOT, OTHER, nbytes), 1),
        (tensor(OUTPUT), (SLOT, OTHER, (1 << 64) - 1), 2),
    ):
        plan = claimed()
        plan.copy(dst, src, length)
        with pytest.raises(ValueError, match="outside of"):
            plan.seal()


def test_no_step_uses_a_slot_of_which_nothing_was_claimed() -> None:
    plan = small_plan()
    plan.copy((SLOT, RANK, 0), tensor(INPUT), 1)
    with pytest.raises(ValueError, match="step 0 of the plan writes outside"):
        plan.seal()


@pytest.mark.parametrize(
    ("turns", "stride", "at", "fits"),
    [
        (10, 10, 0, True),
        (10, 10, 1, False),
        (11, 10, 0, False),
        (1, 1 << 60, 90, True),
        (2, (1 << 64) - 1, 0, False),
        ((1 << 32) + 1, 1 << 32, 0, False),  # more than any size can be
        ((1 << 63) + 1, 2, 0, False),
        (1 << 40, 0, 90, True),
    ],
)
def test_the_last_turn_of_a_loop_stays_inside_as_well(turns: int, stride: int, at: int, fits: bool) -> None:
    for dst, src in ((tensor(OUTPUT, at), tensor(INPUT)), (tensor(OUTPUT), tensor(INPUT, at))):
        plan = small_plan()
        plan.loop(turns, stride)
        plan.copy(dst, src, 10)
        plan.end()
        if fits:
            assert plan.seal() is plan
        else:
            with pytest.raises(ValueError, match=r"step . of the plan"):
                plan.seal()


def test_loops_have_turns_and_ends_and_no_loops_in_them() -> None:
    def refused(complaint: str, *adds: Adding) -> None:
        plan = small_plan()
        for add in adds:
            add(plan)
        with pytest.raises(ValueError, match=complaint):
            plan.seal()

    refused(r"step 1 .* a loop in a loop", lambda plan: plan.loop(2, 0), lambda plan: plan.loop(2, 0))
    refused(r"step 0 .* of no turns", lambda plan: plan.loop(0, 0), lambda plan: plan.end())
    refused(r"step 0 .* ends no loop", lambda plan: plan.end())
    refused(
        r"step 2 .* ends no loop",
        lambda plan: plan.loop(2, 0),
        lambda plan: plan.end(),
        lambda plan: plan.end(),
    )
    refused("leaves a loop open", lambda plan: plan.loop(2, 0))


def test_a_sealed_plan_gets_no_more_steps_and_an_open_one_is_not_run(board: Board) -> None:
    plan = small_plan()
    with pytest.raises(ValueError, match="not sealed"):
        Script(board.arrivals, plan, NotingHost(board))
    plan.seal()
    for add in (plan.end, lambda: plan.copy(tensor(OUTPUT), tensor(INPUT), 1), lambda: plan.claim(0)):
        with pytest.raises(ValueError, match="the plan is sealed"):
            add()
    assert len(plan) == 0


def test_a_plan_of_which_sizes_are_unknown_is_checked_by_number_of_tensor() -> None:
    plan = Plan(RANK, [], [None])
    plan.copy(tensor(0, 1 << 40), tensor(0), 1 << 30)
    plan.seal()
    plan = Plan(RANK, [], [None])
    plan.copy(tensor(1), tensor(0), 1)
    with pytest.raises(ValueError, match="writes outside"):
        plan.seal()


@pytest.mark.parametrize("whom", [OTHER, NOBODY])
def test_what_others_published_with_a_fence_is_read_behind_a_fence_of_all(whom: int) -> None:
    plan = small_plan()
    plan.fence()
    plan.noted(7, None)
    plan.fence(whom)
    plan.noted(7, None)
    with pytest.raises(ValueError, match="step 3 of the plan reads what was published with no fence of all"):
        plan.seal()


def test_a_plan_takes_memory_once() -> None:
    plan = small_plan()
    plan.fence()
    plan.take([(OTHER, 0), (OTHER, 1)], None)
    plan.take([(OTHER, 0)], None)
    with pytest.raises(ValueError, match="step 2 of the plan takes memory a second time"):
        plan.seal()
