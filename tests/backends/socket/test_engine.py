"""Scripts of the core: what each step of a plan does, and how Python goes on."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.boards import Members, operation
from support.scripts import NotingHost, plan_for, script_on, tensor
from support.threads import ends_of

import dist2
from dist2.backends.socket.lowering import FILL, PAST, THROUGH
from dist2.backends.socket.overlap import MAPPED, SLOT
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import (
    ALL,
    GAVE_UP,
    HEADER_WORDS,
    IS_MAPPED,
    NOBODY,
)
from dist2.backends.socket.transport.boards.pieces import HALVES, LONGER, TINY
from dist2.operation.engine import FOLD_NAMES, LEAVE, RESTART, RETRY, Plan, Script
from dist2.operation.record import Operation

HERE = (IS_MAPPED, 1, *[0] * (HEADER_WORDS - 2))
"""The header of one part in memory that is mapped in this process."""


@pytest.fixture
def board() -> Iterator[Board]:
    """The board of a group of one."""
    made = Members(1)
    yield made.boards[0]
    made.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(2)
    yield made
    made.close()


# Copies


GUARD = 128


def run_copy(
    board: Board, dst: torch.Tensor, src: torch.Tensor, to: int, start: int, nbytes: int, way: int
) -> None:
    plan = plan_for(0, [src], [dst])
    plan.copy(tensor(1, to), tensor(0, start), nbytes, way)
    script, _ = script_on(board, plan)
    script.run(operation(0), [src], [dst])


@pytest.mark.parametrize("way", [THROUGH, PAST, FILL])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 4095, 4096, 65536 + 17, (1 << 20) + 129, (5 << 20) + 7])
def test_copies_move_these_bytes_and_no_others(board: Board, nbytes: int, way: int) -> None:
    source = torch.randint(1, 255, (nbytes + GUARD,), dtype=torch.uint8)
    for far, (to, start) in itertools.product((0, 99), ((0, 0), (3, 8), (61, 1), (64, 33))):
        board.arrivals.far = far
        result = torch.zeros(nbytes + GUARD, dtype=torch.uint8)
        run_copy(board, result, source, to, start, nbytes, way)
        assert torch.equal(result[to : to + nbytes], source[start : start + nbytes])
        assert not result[:to].any()
        assert not result[to + nbytes :].any()


@pytest.mark.parametrize("way", [THROUGH, PAST, FILL])
@pytest.mark.parametrize("nbytes", [100, 100_000, 2 << 20])
def test_copies_may_overlap(board: Board, nbytes: int, way: int) -> None:
    board.arrivals.far = 99
    margin = 4096
    for ahead in (-4096, -65, -1, 0, 1, 65, 4096):
        memory = torch.randint(0, 255, (nbytes + 2 * margin,), dtype=torch.uint8)
        expected = memory[margin : margin + nbytes].clone()
        run_copy(board, memory, memory, margin + ahead, margin, nbytes, way)
        assert torch.equal(memory[margin + ahead :][:nbytes], expected)


@pytest.mark.parametrize("nbytes", [1, (1 << 20) - 1, 1 << 20, (5 << 20) + 7])
def test_what_only_this_rank_uses_is_copied_at_the_fence(members: Members, nbytes: int) -> None:
    """Right behind its arrival, also if it has to wait then."""
    source = torch.randint(1, 255, (nbytes,), dtype=torch.uint8)
    result = torch.zeros(nbytes + GUARD, dtype=torch.uint8)
    plan = plan_for(0, [source], [result])
    plan.fence(ALL, (tensor(1, 5), tensor(0), nbytes))
    script, host = script_on(members.boards[0], plan)
    seen = []

    def wait(call: Operation) -> None:
        seen.append(torch.equal(result[5 : 5 + nbytes], source))
        members.boards[0].wait(call)

    host.wait = wait

    def come() -> None:
        board, call = members.boards[1], operation(1)
        board.meet(call)
        while not seen:
            board.arrivals.order()
        board.fence(call)

    assert ends_of(lambda: script.run(operation(0), [source], [result]), come) == [None, None]
    assert seen[0]
    assert torch.equal(result[5 : 5 + nbytes], source)
    assert not (result[:5].any() or result[5 + nbytes :].any())


# Loops


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_places_in_tensors_move_on_in_a_loop_and_those_in_slots_stay(board: Board, turns: int) -> None:
    """Steps before a loop and behind it stand where they were."""
    block, head = 40, 8
    source = torch.arange(head + block * turns + head, dtype=torch.int64).to(torch.uint8)
    result = torch.zeros_like(source)
    plan = plan_for(0, [source], [result])
    plan.copy(tensor(1), tensor(0), head)
    plan.loop(turns, block)
    plan.claim(HALVES)
    plan.copy((SLOT, 0, 16), tensor(0, head), block, FILL)
    plan.copy(tensor(1, head), (SLOT, 0, 16), block)
    plan.end()
    plan.copy(tensor(1, head + block * turns), tensor(0, head + block * turns), head)
    script, _ = script_on(board, plan)
    for _ in range(2):
        before = board.turn
        script.run(operation(0), [source], [result.zero_()])
        assert torch.equal(result, source)
        assert board.turn == before ^ turns & 1


def test_a_step_of_python_in_a_loop_is_done_at_each_turn_on_the_next_block(board: Board) -> None:
    vectors = torch.arange(12, dtype=torch.float32)
    result = torch.zeros(6)
    plan = plan_for(0, [vectors], [result])
    plan.loop(3, 8)
    plan.fold_elsewhere(tensor(1), [tensor(0), tensor(0, 24)], 8, "fold")
    plan.end()
    script, host = script_on(board, plan)
    found: list[list[int]] = []
    host.act = lambda script, at: found.append(script.addresses(at))
    script.run(operation(0), [vectors], [result])
    assert host.done == [(1, "fold")] * 3
    to, first = result.data_ptr(), vectors.data_ptr()
    assert found == [[to + 8 * turn, first + 8 * turn, first + 24 + 8 * turn] for turn in range(3)]


def test_a_call_that_failed_in_a_loop_leaves_the_places_of_the_next_one_alone(board: Board) -> None:
    source, result = torch.arange(1, 9, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    plan = plan_for(0, [source], [result])
    plan.copy(tensor(1), tensor(0), 2)
    plan.loop(3, 2)
    plan.fold_elsewhere(tensor(1), [], 0, "step")
    plan.copy(tensor(1, 2), tensor(0, 2), 2)
    plan.end()
    script, host = script_on(board, plan)

    def fail_at_the_last(script: Any, at: int) -> None:
        if len(host.done) == 3:
            raise RuntimeError("no way on")

    host.act = fail_at_the_last
    with pytest.raises(RuntimeError, match="no way on"):
        script.run(operation(0), [source], [result])
    assert result.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    script.run(operation(0), [source], [result.zero_()])
    assert torch.equal(result, source)


# How Python goes on


def counting_plan(board: Board) -> tuple[Any, NotingHost, torch.Tensor, torch.Tensor]:
    """Return a script that copies a byte, leaves a step to Python, and copies another byte."""
    source, result = torch.tensor([1, 2], dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    plan = plan_for(0, [source], [result])
    plan.copy(tensor(1), tensor(0), 1)
    plan.fold_elsewhere(tensor(1), [], 0, "payload")
    plan.copy(tensor(1, 1), tensor(0, 1), 1)
    return *script_on(board, plan), source, result


def test_a_script_goes_on_behind_the_step_that_python_has_done(board: Board) -> None:
    script, host, source, result = counting_plan(board)
    host.act = lambda script, at: result.add_(10)
    script.run(operation(0), [source], [result])
    assert result.tolist() == [11, 2]
    assert host.done == [(1, "payload")]
    assert len(script) == 3


def test_a_step_that_python_has_prepared_is_run_again(board: Board) -> None:
    script, host, source, result = counting_plan(board)
    host.answers = [RETRY, RETRY]
    host.act = lambda script, at: result.add_(10)
    script.run(operation(0), [source], [result])
    assert host.done == [(1, "payload")] * 3
    assert result.tolist() == [31, 2]


def test_python_may_have_a_script_begin_anew(board: Board) -> None:
    script, host, source, result = counting_plan(board)
    host.answers = [RESTART]
    host.act = lambda script, at: result.add_(10)
    script.run(operation(0), [source], [result])
    assert host.done == [(1, "payload")] * 2
    assert result.tolist() == [11, 2]  # the first byte was copied again


def test_python_may_have_the_other_plan_run(board: Board) -> None:
    """Which a call that exposes memory has."""
    source, result = torch.tensor([1], dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    slots = plan_for(0, [source], [result])
    slots.copy(tensor(1, 1), tensor(0), 1)
    other, beside = script_on(board, slots)
    plan = plan_for(0, [source], [result])
    plan.offer([tensor(0)])
    plan.fold_elsewhere(tensor(1), [], 0, "choose")
    plan.copy(tensor(1), tensor(0), 1)
    script, host = script_on(board, plan, other)
    host.answers = [LEAVE]
    script.run(operation(0), [source], [result])
    assert result.tolist() == [0, 1]
    script.run(operation(0), [source], [result.zero_()])
    assert result.tolist() == [1, 0]
    assert host.done == [(1, "choose")] * 2
    assert not (host.failures or beside.failures)


def test_blocks_that_only_other_ranks_have_are_passed_once(board: Board) -> None:
    script, host, source, result = counting_plan(board)
    host.act = lambda script, at: setattr(script, "extra_turns", 3 if len(host.done) == 1 else 0)
    for _ in range(2):
        script.run(operation(0), [source], [result])
    assert host.extra == [3]


def test_a_step_that_fails_in_python_leaves_the_script_usable(board: Board) -> None:
    script, host, source, result = counting_plan(board)

    def fail(script: Any, at: int) -> None:
        host.act = None
        raise KeyError("broken")

    host.act = fail
    with pytest.raises(KeyError, match="broken"):
        script.run(operation(0), [source], [result])
    assert result.tolist() == [1, 0]
    script.run(operation(0), [source], [result.zero_()])
    assert result.tolist() == [1, 2]
    assert not host.failures  # it exposed nothing


def test_a_wait_that_fails_leaves_the_script_usable(members: Members) -> None:
    source, result = torch.tensor([1.0, 2.0]), torch.zeros(2)
    plan = plan_for(0, [source], [result])
    plan.offer([tensor(0)])
    plan.fence()
    plan.copy(tensor(1), tensor(0), 8)
    plan.fence()
    script, host = script_on(members.boards[0], plan)
    members.boards[1].meeting.look_up()  # its region is there

    def fail(call: Operation) -> None:
        host.wait = members.boards[0].wait
        raise TimeoutError("nobody came")

    host.wait = fail
    with pytest.raises(TimeoutError, match="nobody came"):
        script.run(operation(0), [source], [result])
    assert [(first, str(error)) for first, error in host.failures] == [(1, "nobody came")]
    assert members.boards[0].phase == 1 and not result.any()

    def come() -> None:
        call = operation(1)
        for _ in range(3):  # that of the failed call, and two more
            members.boards[1].fence(call)

    assert ends_of(lambda: script.run(operation(0), [source], [result]), come) == [None, None]
    assert torch.equal(result, source) and len(host.failures) == 1


def test_each_call_finds_its_own_tensors(board: Board) -> None:
    script, _, _, _ = counting_plan(board)
    for value in range(5):
        source, result = torch.full((2,), value, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
        script.run(operation(0), (source,), (result,))
        assert torch.equal(result, source)


def test_a_script_keeps_nothing_of_its_calls(board: Board) -> None:
    script, _, source, result = counting_plan(board)
    call, inputs, outputs = operation(0), [source], [result]
    script.run(call, inputs, outputs)
    before = [sys.getrefcount(each) for each in (source, result, call, inputs, outputs)]
    for _ in range(1000):
        script.run(call, inputs, outputs)
    assert [sys.getrefcount(each) for each in (source, result, call, inputs, outputs)] == before


def test_a_script_ends_in_a_collection(board: Board) -> None:
    script, host, _, _ = counting_plan(board)
    host.act = script.run  # a cycle
    seen = weakref.ref(host)
    del script, host
    gc.collect()
    assert seen() is None


# Folds that the core leaves to Python


def test_a_fold_of_elements_across_words_is_the_callers(board: Board) -> None:
    memory, result = torch.zeros(64, dtype=torch.uint8), torch.zeros(2)
    plan = plan_for(0, [memory], [result])
    plan.fold(FOLD_NAMES["sum_float32"], 1.0, tensor(1), [tensor(0, 1), tensor(0, 9)], 8, "across words")
    script, host = script_on(board, plan)
    found: list[list[int]] = []
    host.act = lambda script, at: found.append(script.addresses(at))
    script.run(operation(0), [memory], [result])
    assert host.done == [(0, "across words")]
    assert found == [[result.data_ptr(), memory.data_ptr() + 1, memory.data_ptr() + 9]]


# Memory that members expose


def exposing(rank: int, source: torch.Tensor, result: torch.Tensor) -> Any:
    """Return a plan that exposes an input, and copies that of the other member to the output."""
    plan = plan_for(rank, [source], [result])
    plan.offer([tensor(0)])
    plan.fence()
    plan.take([(1 - rank, 0)], "find")
    plan.copy(tensor(1), (MAPPED, 0, 4), source.nbytes - 4)
    plan.fence(checked="one gave up")
    return plan


def knowing(host: NotingHost, rank: int) -> None:
    """Have a host say where the other's memory is, when it is asked."""
    host.answers = [RETRY]
    host.act = lambda script, at: host.board.arrivals.know(rank, HERE, 0)


def test_a_script_finds_what_others_expose_where_it_is_at_the_time(members: Members) -> None:
    sources = [torch.arange(4.0), torch.arange(4.0)]
    results = [torch.zeros(4), torch.zeros(4)]
    scripts = [
        script_on(members.boards[rank], exposing(rank, sources[rank], results[rank])) for rank in (0, 1)
    ]
    for rank, (_, host) in enumerate(scripts):
        knowing(host, 1 - rank)

    def calls(rank: int) -> None:
        script, _ = scripts[rank]
        for turn in range(20):
            source, result = torch.arange(4.0) + 100 * rank + turn, torch.zeros(4)
            script.run(operation(rank), [source], [result])
            assert result.tolist() == [each + 100 * (1 - rank) + turn for each in (1, 2, 3)] + [0]

    assert ends_of(lambda: calls(0), lambda: calls(1)) == [None, None]
    for _, host in scripts:
        assert host.done == [(2, "find")]
        assert not host.failures


def test_members_that_expose_ordinary_memory_all_run_their_other_plan(members: Members) -> None:
    """One has a shared tensor, the other has not."""
    tensors = [dist2.shared_empty(4).fill_(5), torch.full((4,), 6.0)]
    results = [torch.zeros(4), torch.zeros(4)]

    def call(rank: int) -> int:
        board, source, result = members.boards[rank], tensors[rank], results[rank]
        slots = plan_for(rank, [source], [result])
        slots.copy(tensor(1), tensor(0), source.nbytes)
        other = Script(board.arrivals, slots.seal(), NotingHost(board, one_process=False))
        host = NotingHost(board, one_process=False)
        script = Script(board.arrivals, exposing(rank, source, result).seal(), host, other)
        script.run(operation(rank), [source], [result])
        assert not (host.done or host.failures)
        return int(board.phase)

    assert ends_of(lambda: call(0), lambda: call(1)) == [1, 1]
    assert [result.tolist() for result in results] == [[5.0] * 4, [6.0] * 4]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_plan_for_shared_tensors_gives_way_to_the_other_at_once(board: Board, is_shared: bool) -> None:
    source = dist2.shared_empty(4).fill_(3) if is_shared else torch.full((4,), 3.0)
    result = torch.zeros(4)
    slots = plan_for(0, [source], [result])
    slots.copy(tensor(1), tensor(0), 8)
    host = NotingHost(board, one_process=False)
    other = Script(board.arrivals, slots.seal(), host)
    plan = plan_for(0, [source], [result])
    plan.expect_shared([tensor(0), tensor(0, 16)])
    plan.offer([tensor(0)])
    plan.fence()
    plan.copy(tensor(1), tensor(0), 16)
    Script(board.arrivals, plan.seal(), host, other).run(operation(0), [source], [result])
    assert result.tolist() == ([3.0] * 4 if is_shared else [3.0, 3.0, 0, 0])
    assert board.phase == is_shared


def test_a_member_that_has_given_up_is_noticed_at_the_last_fence(members: Members) -> None:
    source, result = torch.arange(4.0), torch.zeros(4)
    mine, theirs = members.boards
    script, host = script_on(mine, exposing(0, source, result))

    def act(script: Any, at: int) -> None:
        mine.arrivals.know(1, HERE, 0)

    host.answers, host.act = [RETRY], act

    def other() -> None:
        call = operation(1)
        plan = plan_for(1, [source], [])
        plan.offer([tensor(0)])
        plan.fence()
        exposer, _ = script_on(theirs, plan)
        exposer.run(call, [source], [])
        theirs.regions.words(1)[GAVE_UP] = 1
        theirs.fence(call)

    call = operation(0)
    assert ends_of(lambda: script.run(call, [source], [result]), other) == [None, None]
    assert host.done == [(2, "find"), (4, "one gave up")]
    assert result.tolist() == [1, 2, 3, 0]


def test_exposed_memory_that_is_not_known_is_the_callers(members: Members) -> None:
    """No copy reads it, whatever the table of its owner says."""
    source, result = torch.arange(4.0), torch.zeros(4)
    script, host = script_on(members.boards[0], exposing(0, source, result))

    def fail(script: Any, at: int) -> None:
        raise LookupError("not mapped")

    host.act = fail

    def other() -> None:
        plan = plan_for(1, [source], [])
        plan.offer([tensor(0)])
        plan.fence()
        script_on(members.boards[1], plan)[0].run(operation(1), [source], [])

    failed, _ = ends_of(lambda: script.run(operation(0), [source], [result]), other)
    assert isinstance(failed, LookupError)
    assert [(first, error) for first, error in host.failures] == [(1, failed)]
    assert not result.any()


# Fences, notes and pieces


def test_what_one_notes_the_other_sees_behind_the_fence(members: Members) -> None:
    """For both parities of fences."""

    def run(rank: int) -> list[int]:
        board, found = members.boards[rank], []
        for turn in range(6):
            plan = Plan(rank, (), ())
            plan.fence(number=7 + turn if rank else 7)
            plan.noted(7, "another number")
            script, host = script_on(board, plan)
            script.run(operation(rank), (), ())
            found.append(len(host.done))
            assert board.noted() == [7 if rank else 7 + turn]
        return found

    assert ends_of(lambda: run(0), lambda: run(1)) == [[0, 1, 1, 1, 1, 1], [0] * 6]


def test_a_script_may_wait_for_one_member_or_for_none(members: Members) -> None:
    def script(whom: int) -> Any:
        plan = Plan(0, (), ())
        plan.fence(whom)
        return script_on(members.boards[0], plan)[0]

    members.boards[1].meeting.look_up()
    members.boards[0].meeting.look_up()
    call = operation(0)
    script(NOBODY).run(call, (), ())
    assert members.boards[0].phase == 1 and members.boards[1].phase == 0

    def come() -> None:
        for _ in range(2):
            members.boards[1].fence(operation(1), NOBODY)

    assert ends_of(lambda: script(1).run(call, (), ()), come) == [None, None]


@pytest.mark.parametrize("kind", [TINY, LONGER, HALVES])
def test_slots_carry_data_from_member_to_member(members: Members, kind: int) -> None:
    """More operations than there are pieces, by a member that waits for none and one that waits for it."""
    rounds, numel = 200, 100

    def run(rank: int) -> None:
        source, result = torch.zeros(numel), torch.zeros(numel)
        plan = plan_for(rank, [source], [result])
        plan.claim(kind)
        if rank == 0:
            plan.copy((SLOT, 0, 0), tensor(0), source.nbytes, FILL)
        plan.fence(ALL if kind == HALVES else NOBODY if rank == 0 else 0)
        plan.copy(tensor(1), (SLOT, 0, 0), source.nbytes)
        script, _ = script_on(members.boards[rank], plan)
        for turn in range(rounds):
            script.run(operation(rank), [source.fill_(turn)], [result])
            assert result.eq(turn).all()

    assert ends_of(lambda: run(0), lambda: run(1)) == [None, None]


def test_members_whose_words_come_soon_are_not_far(members: Members) -> None:
    """All are on one core here. Only members that move much data measure distances."""
    mine, theirs = members.boards
    mine.meeting.look_up()
    theirs.meeting.look_up()
    source, result = torch.zeros(2, 1 << 20, dtype=torch.uint8)

    def meet(nbytes: int) -> int:
        for board, whom in ((theirs, NOBODY), (mine, ALL)):
            plan = plan_for(board.rank, [source], [result])
            plan.copy(tensor(1), tensor(0), nbytes)
            plan.fence(whom)
            script_on(board, plan)[0].run(operation(board.rank), [source], [result])
        assert mine.phase == theirs.phase
        return int(mine.arrivals.far)

    mine.arrivals.far = 16
    assert [meet(nbytes=1024) for _ in range(10)] == [16] * 10
    assert any(meet(nbytes=1 << 20) == 0 for _ in range(10_000))  # this thread may lose its core at any time
