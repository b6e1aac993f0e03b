"""Steps in C beside their counterparts in Python: equal bits of folds, places, and the conditions that stop a
script."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.boards import Members, operation

import dist2
from dist2 import OperationTimeoutError
from dist2.backends.socket.bound_steps import (
    FIXED,
    Bound,
    Folding,
    Way,
    being_shared,
    beside,
    copying,
    copying_both,
    copying_own,
    expecting,
    fencing,
    finding,
    folding,
    having_noted,
    noting,
    reading,
    storing,
)
from dist2.backends.socket.reaching import fold_bytes
from dist2.backends.socket.script import script_of
from dist2.backends.socket.transport.boards.control_words import ALL, NOBODY
from dist2.compiled import steps
from dist2.operation.kinds import AVG, MAX, SUM, premul_sum

DTYPES = (
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    5e-324,
    1e-310,
    1e-40,
    -1e-45,
    3.4e38,
    1.7e308,
]


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(2)
    made.boards[0].meeting.look_up()
    yield made
    made.close()


@pytest.fixture(params=["none", "sse2", "avx512"])
def _swept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Long copies by each of the ways that processors have, of which only the best would be used here."""
    assert steps is not None
    if request.param not in steps.SWEEPS:
        pytest.skip(f"this processor has no {request.param}")
    steps.sweep_by(request.param)
    yield
    steps.sweep_by(steps.SWEEPS[-1])


def nothing(argument: object) -> None:
    raise AssertionError("Python was not to do this step")


def vectors(dtype: torch.dtype, count: int, numel: int) -> list[torch.Tensor]:
    """Return vectors of any bits, with all pairs of special values among them."""
    bits = torch.randint(0, 256, (count, numel * dtype.itemsize), dtype=torch.uint8)
    made = list(bits.view(dtype).unbind())
    if dtype.is_complex or dtype.is_floating_point:
        real = [vector.view(vector.real.dtype) if dtype.is_complex else vector for vector in made]
        special = torch.tensor(SPECIAL, dtype=torch.float64).to(real[0].dtype)
        pairs = torch.cartesian_prod(special, special)
        for at, vector in enumerate(real):
            vector[: len(pairs)] = pairs[:, at % 2]
    return made


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two vectors have the same bits, except for the payloads of NaNs."""
    if left.is_complex():
        left, right = left.view(left.real.dtype), right.view(right.real.dtype)
    integers = {4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    equal = left.view(integers) == right.view(integers)
    if left.is_floating_point():
        equal |= left.isnan() & right.isnan()
    return bool(equal.all())


@pytest.mark.parametrize("reduction", [SUM, AVG, premul_sum(2.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_folds_are_those_of_torch_to_the_bit(members: Members, dtype: torch.dtype, reduction: object) -> None:
    for count in (2, 3, 4, 5, 6, 8, 9, 10, 13, 16, 17, 64, 65, 131):
        fold = Folding.of(reduction, dtype, count)
        if not fold.native:
            assert reduction is AVG
            assert not (dtype.is_floating_point or dtype.is_complex)
            continue
        for numel in (1, 7, 1500):
            srcs = vectors(dtype, count, max(numel, 150))
            srcs = [src[:numel] for src in srcs]
            expected = torch.empty_like(srcs[0])
            fold.function(expected, [src.clone() for src in srcs])
            for into in (-1, 0, count - 1):  # elsewhere, over the first, over the last
                copies = [src.clone() for src in srcs]
                dst = torch.empty_like(expected) if into < 0 else copies[into]
                places = [(at, 0) for at in range(count)]
                bound = folding(nothing, fold, (count if into < 0 else into, 0), places, dst.nbytes, numel)
                script = script_of(members.boards[0], [bound], count, 1)
                assert script is not None
                assert script.run(operation(0), copies, [dst], 0, 0) == 1
                assert same(dst, expected), (count, numel, into)


def test_what_c_does_not_fold_is_left_to_torch() -> None:
    assert folding(nothing, Folding.of(MAX, torch.float32, 2), (0, 0), [(0, 0)], 4, 1).native is None
    assert folding(nothing, Folding.of(SUM, torch.bfloat16, 2), (0, 0), [(0, 0)], 2, 1).native is None


def test_a_fold_of_elements_across_words_stops_the_script(members: Members) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    fold = Folding.of(SUM, torch.float32, 2)
    bound = folding(nothing, fold, (1, 0), [(0, 1), (0, 9)], 8, 2)
    script = script_of(members.boards[0], [bound], 1, 1)
    assert script is not None
    assert script.run(operation(0), [memory], [torch.zeros(2)], 0, 0) == 0


def test_copies_go_from_place_to_place_and_stop_where_python_is_wanted(members: Members) -> None:
    source, result = torch.arange(12, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8)
    bound = [
        copying(nothing, (1, 0), (0, 4), 2),
        Bound(nothing),
        copying(nothing, (1, 6), (0, 0), 3),
    ]
    script = script_of(members.boards[0], bound, 1, 1)
    assert script is not None
    assert script.run(operation(0), [source], [result], 2, 0) == 1
    assert result.tolist() == [0, 0, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0]
    assert script.run(operation(0), [source], [result], 2, 2) == 3
    assert result.tolist() == [0, 0, 6, 7, 0, 0, 0, 0, 2, 3, 4, 0]


@pytest.mark.parametrize("nbytes", [0, 1, (128 << 10) - 1, 128 << 10, (128 << 10) + 1, 5 << 20])
@pytest.mark.parametrize("backwards", [False, True])
def test_both_ways_move_the_same_bytes(members: Members, nbytes: int, backwards: bool) -> None:
    """In this process, and by the kernel, which moves 4 MiB backwards in a call."""
    pid, guard = os.getpid(), 3
    source = torch.randint(1, 255, (nbytes + guard,), dtype=torch.uint8)
    results = [torch.zeros_like(source) for _ in range(2)]
    start = source.data_ptr()
    bound = [
        copying(nothing, (FIXED, results[0].data_ptr()), (FIXED, start), nbytes, backwards),
        reading(nothing, 1, pid, -1, (FIXED, results[1].data_ptr()), (FIXED, start), nbytes, backwards),
    ]
    script = script_of(members.boards[0], bound)
    assert script is not None
    assert script.run(operation(0), (), (), 0, 0) == 2
    for result in results:
        assert torch.equal(result[:nbytes], source[:nbytes])
        assert not result[nbytes:].any()


def test_what_was_read_of_a_process_that_has_ended_stops_the_script(members: Members) -> None:
    """A process id may belong to another process by then: in this test to the own one."""
    child = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(child.pid)
    source, result = torch.ones(100), torch.zeros(100)
    places = (FIXED, result.data_ptr()), (FIXED, source.data_ptr())
    script = script_of(members.boards[0], [reading(nothing, 1, os.getpid(), pidfd, *places, 400)])
    assert script is not None
    assert script.run(operation(0), (), (), 0, 0) == 1
    child.kill()
    child.wait()
    assert script.run(operation(0), (), (), 0, 0) == 0
    os.close(pidfd)


@pytest.mark.parametrize("backwards", [False, True])
def test_what_the_kernel_cannot_reach_stops_the_script(members: Members, backwards: bool) -> None:
    nbytes = 300 << 10
    result = torch.zeros(nbytes, dtype=torch.uint8)
    bound = [
        reading(nothing, 1, os.getpid(), -1, (FIXED, result.data_ptr()), (FIXED, 4096), nbytes, backwards)
    ]
    script = script_of(members.boards[0], bound)
    assert script is not None
    assert script.run(operation(0), (), (), 0, 0) == 0


def test_bytes_are_stored_where_they_are_looked_for(members: Members) -> None:
    page = torch.zeros(16, dtype=torch.uint8)
    at = page.data_ptr() + 4
    look = expecting(nothing, at, b"lent")
    script = script_of(members.boards[0], [look, storing(nothing, at, b"lent"), look])
    assert script is not None
    assert script.run(operation(0), (), (), 0, 0) == 0
    assert script.run(operation(0), (), (), 0, 1) == 3
    assert bytes(page.tolist()) == bytes(4) + b"lent" + bytes(8)


def test_who_stores_what_stands_there_waits_for_nobody(members: Members) -> None:
    mine = members.boards[0]
    page = torch.zeros(8, dtype=torch.uint8)
    come = fencing(nothing, whom=NOBODY)  # the other member does not, so it may still read the old bytes
    for stored in (bytes(8), bytes(7) + b"!"):
        script = script_of(mine, [come, storing(nothing, page.data_ptr(), stored)])
        assert script is not None
        if any(stored):
            with pytest.raises(OperationTimeoutError):
                script.run(operation(0, timeout_s=0.05), (), (), 0, 0)
        else:
            assert script.run(operation(0), (), (), 0, 0) == 2
    assert not page.any()


def test_what_is_stored_tells_where_the_tensors_of_the_call_lie(members: Members) -> None:
    page = torch.zeros(32, dtype=torch.uint8)
    stored = b"how...." + bytes(16) + b"behind"
    step = storing(nothing, page.data_ptr(), stored, 7, [(1, 4), (0, 0)])
    script = script_of(members.boards[0], [step], 1, 1)
    assert script is not None
    for _ in range(2):
        source, result = torch.zeros(8), torch.zeros(8)
        assert script.run(operation(0), [source], [result], 0, 0) == 1
        addresses = struct.pack("=QQ", result.data_ptr() + 4, source.data_ptr())
        assert bytes(page.tolist()) == b"how...." + addresses + b"behind" + bytes(3)


def test_a_script_finds_what_others_lend_where_it_is_at_the_time(members: Members) -> None:
    """Also after a step that Python has done, and with memory mapped at another address."""
    page, result = torch.zeros(24, dtype=torch.uint8), torch.zeros(4)
    look = finding(nothing, page.data_ptr(), b"ordinary", 1, 2, -64)
    copies = [copying(nothing, (0, 0), (2, 0), 8), Bound(nothing), copying(nothing, (0, 8), (1, 8), 8)]
    script = script_of(members.boards[0], [look, *copies], 0, 1, 2)
    assert script is not None
    assert script.run(operation(0), [], [result], 0, 0) == 0  # no member exposes memory of that kind
    for start in (0.0, 10.0):
        lent = [torch.arange(start, start + 4), torch.arange(start + 4, start + 8)]
        table = b"ordinary" + struct.pack("=QQ", *[each.data_ptr() + 64 for each in lent])
        page.copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
        assert script.run(operation(0), [], [result], 0, 0) == 2
        assert result[:2].tolist() == [start + 4, start + 5]
        assert script.run(operation(0), [], [result], 0, 3) == 4
        assert result[2:].tolist() == [start + 2, start + 3]
    page[0] = 0
    assert script.run(operation(0), [], [result], 0, 0) == 0


def test_a_script_knows_shared_tensors_from_ordinary_ones(members: Members) -> None:
    ordinary, shared = torch.zeros(4), dist2.shared_empty(4)
    for wanted in (False, True):
        script = script_of(members.boards[0], [being_shared(nothing, (0, 4), wanted)], 1)
        assert script is not None
        for tensor, is_shared in ((ordinary, False), (shared, True)):
            assert script.run(operation(0), [tensor], (), 0, 0) == (wanted == is_shared)


def test_what_one_notes_the_other_sees_behind_the_fence(members: Members) -> None:
    """For both parities of fences, between a board with steps in C and one with steps in Python."""
    mine, theirs = members.boards
    theirs.meeting.look_up()
    for turn in range(4):
        bound = [noting(nothing, 7 + turn), fencing(nothing), having_noted(nothing, 99)]
        script = script_of(mine, bound)
        assert script is not None
        theirs.note(operation(1), 99 if turn % 2 else 5)
        with ThreadPoolExecutor(1) as pool:
            crossed = pool.submit(theirs.fence, operation(0))
            assert script.run(operation(0), (), (), 0, 0) == (3 if turn % 2 else 2)
            crossed.result(10)
        assert theirs.noted() == [7 + turn]


def test_what_concerns_nobody_else_is_copied_behind_the_arrival(members: Members) -> None:
    """The copy is made at the arrival at the fence, also if the script then has to wait."""
    mine, theirs = members.boards
    theirs.meeting.look_up()
    for turn in range(20):
        source, result = torch.full((9,), float(turn)), torch.zeros(9)
        script = script_of(mine, [copying_own(nothing, (1, 4), (0, 0), 32), fencing(nothing)], 1, 1)
        assert script is not None
        with ThreadPoolExecutor(1) as pool:
            crossed = pool.submit(theirs.fence, operation(0))
            assert script.run(operation(0), [source], [result], 0, 0) == 2
            crossed.result(10)
        assert result.tolist() == [0.0] + [float(turn)] * 8


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("nbytes", [(1 << 20) - 1, 1 << 20, (1 << 20) + 16385, (5 << 20) + 7])
def test_long_copies_of_what_is_the_callers_move_the_same_bytes(
    members: Members, nbytes: int, backwards: bool
) -> None:
    """They go past the caches, in lines and pages, for any start and end."""
    guard = 64
    for to, start in ((0, 0), (3, 8), (61, 1)):
        source = torch.randint(1, 255, (nbytes + guard,), dtype=torch.uint8)
        result = torch.zeros(guard + nbytes + guard, dtype=torch.uint8)
        dst, src = (FIXED, result.data_ptr() + to), (FIXED, source.data_ptr() + start)
        way = Way.BACKWARDS if backwards else Way.FORWARDS
        bound = [copying_own(nothing, dst, src, nbytes, way), fencing(nothing, whom=NOBODY)]
        script = script_of(members.boards[0], bound)
        assert script is not None
        assert script.run(operation(0), (), (), 0, 0) == 2
        assert torch.equal(result[to : to + nbytes], source[start : start + nbytes])
        assert not result[:to].any()
        assert not result[to + nbytes :].any()


SWEPT = [0, 1, 63, 64, 16383, 16384, 3 * 16384 + 4097, (1 << 20) + 129]
SHIFTS = ((0, 0, 0), (3, 8, 0), (61, 1, 5), (64, 33, 7))


def arrivals_in_c(members: Members) -> Any:
    """Return the first member's arrivals, which have more than those in Python."""
    return members.boards[0].arrivals


def run_one(members: Members, bound: Bound) -> None:
    script = script_of(members.boards[0], [bound])
    assert script is not None
    assert script.run(operation(0), (), (), 0, 0) == 1


def holds_between(result: torch.Tensor, to: int, expected: torch.Tensor) -> bool:
    """Whether some bytes are there, and nothing around them."""
    end = to + expected.numel()
    return torch.equal(result[to:end], expected) and not (result[:to].any() or result[end:].any())


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize("way", [Way.FILL, Way.IN, Way.OUT, Way.PAST, Way.AWAY])
@pytest.mark.parametrize("nbytes", SWEPT)
def test_blocks_of_what_is_longer_than_the_caches_move_the_same_bytes(
    members: Members, nbytes: int, way: Way
) -> None:
    source = torch.randint(1, 255, (nbytes + 128,), dtype=torch.uint8)
    for far, (to, start, _) in itertools.product((0, 16), SHIFTS):
        arrivals_in_c(members).far = far
        result = torch.zeros(nbytes + 128, dtype=torch.uint8)
        places = (FIXED, result.data_ptr() + to), (FIXED, source.data_ptr() + start)
        run_one(members, copying(nothing, *places, nbytes, way))
        assert holds_between(result, to, source[start : start + nbytes])


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize("way", [Way.IN, Way.AWAY])
@pytest.mark.parametrize("nbytes", SWEPT)
def test_a_block_goes_to_two_places_at_once(members: Members, nbytes: int, way: Way) -> None:
    source = torch.randint(1, 255, (nbytes + 128,), dtype=torch.uint8)
    for to, start, other in SHIFTS:
        kept, passed = torch.zeros(2, nbytes + 128, dtype=torch.uint8)
        first, second = (FIXED, kept.data_ptr() + to), (FIXED, passed.data_ptr() + other)
        run_one(
            members, copying_both(nothing, first, second, (FIXED, source.data_ptr() + start), nbytes, way)
        )
        assert holds_between(kept, to, source[start : start + nbytes])
        assert holds_between(passed, other, source[start : start + nbytes])


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize("emptied", [0, 63, 3 * 16384 + 4097, 5 * 16384])
@pytest.mark.parametrize("nbytes", [0, 64, 3 * 16384 + 4097, 5 * 16384])
@pytest.mark.parametrize("far", [False, True])
def test_one_block_leaves_a_slot_while_another_goes_into_one(
    members: Members, far: bool, nbytes: int, emptied: int
) -> None:
    """Alternating line by line: with either one longer, into one place or two, at any offset."""
    arrivals_in_c(members).far = 99 * far
    most = 5 * 16384 + 128
    slot, source = torch.randint(1, 255, (2, most), dtype=torch.uint8)
    for is_both in (False, True):
        for to, start, other in SHIFTS:
            out, kept, passed = torch.zeros(3, most, dtype=torch.uint8)
            place, memory = (FIXED, kept.data_ptr() + start), (FIXED, source.data_ptr() + other)
            filling = copying(nothing, place, memory, nbytes, Way.IN)
            if is_both:
                passing = FIXED, passed.data_ptr() + other
                filling = copying_both(nothing, place, passing, memory, nbytes, Way.IN)
            places = (FIXED, out.data_ptr() + to), (FIXED, slot.data_ptr() + start)
            bound = [beside(copying(nothing, *places, emptied, Way.OUT)), filling]
            script = script_of(members.boards[0], bound)
            assert script is not None
            assert script.run(operation(0), (), (), 0, 0) == 2
            assert holds_between(out, to, slot[start : start + emptied])
            assert holds_between(kept, start, source[other : other + nbytes])
            assert holds_between(passed, other, source[other : other + nbytes * is_both])


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize("ahead", [-4096, -1, 0, 1, 4096])
def test_what_a_block_goes_to_may_overlap_it(members: Members, ahead: int) -> None:
    nbytes, margin = 1 << 20, 4096
    slot = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    for places in (1, 2, 3):
        memory = torch.randint(0, 255, (nbytes + 2 * margin,), dtype=torch.uint8)
        kept, out = torch.zeros(2, nbytes, dtype=torch.uint8)
        expected = memory[margin : margin + nbytes].clone()
        src = FIXED, memory.data_ptr() + margin
        dst, keep = (FIXED, src[1] + ahead), (FIXED, kept.data_ptr())
        bound = [copying(nothing, dst, src, nbytes, Way.PAST)]
        if places > 1:
            bound = [copying_both(nothing, keep, dst, src, nbytes, Way.IN)]
        if places > 2:
            leaving = copying(nothing, (FIXED, out.data_ptr()), (FIXED, slot.data_ptr()), nbytes, Way.OUT)
            bound = [beside(leaving), *bound]
        script = script_of(members.boards[0], bound)
        assert script is not None
        assert script.run(operation(0), (), (), 0, 0) == len(bound)
        assert torch.equal(memory[margin + ahead :][:nbytes], expected)
        assert places < 2 or torch.equal(kept, expected)
        assert places < 3 or torch.equal(out, slot)


def test_members_whose_words_come_soon_are_not_far(members: Members) -> None:
    """All are on one core here. Only members that move much data measure distances."""
    first, second = [board.arrivals for board in members.boards]
    source, result = torch.zeros(2, 1 << 20, dtype=torch.uint8)
    places = (FIXED, result.data_ptr()), (FIXED, source.data_ptr())

    def meet(nbytes: int) -> int:
        for board, whom in ((members.boards[1], NOBODY), (members.boards[0], ALL)):
            bound = [copying(nothing, *places, nbytes), fencing(nothing, whom=whom)]
            script = script_of(board, bound)
            assert script is not None
            assert script.run(operation(0), (), (), 0, 0) == 2
        assert first.phase == second.phase
        return int(arrivals_in_c(members).far)

    arrivals_in_c(members).far = 16
    assert [meet(nbytes=1024) for _ in range(10)] == [16] * 10
    assert any(meet(nbytes=1 << 20) == 0 for _ in range(10_000))  # this thread may lose its core at any time


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize("ahead", [-4096, -1, 1, 4096])
def test_long_copies_may_overlap(members: Members, ahead: int) -> None:
    nbytes, margin = 2 << 20, 4096
    memory = torch.randint(0, 255, (nbytes + 2 * margin,), dtype=torch.uint8)
    expected = memory[margin : margin + nbytes].clone()
    src = memory.data_ptr() + margin
    bound = [
        copying_own(nothing, (FIXED, src + ahead), (FIXED, src), nbytes),
        fencing(nothing, whom=NOBODY),
    ]
    script = script_of(members.boards[0], bound)
    assert script is not None
    assert script.run(operation(0), (), (), 0, 0) == 2
    assert torch.equal(memory[margin + ahead :][:nbytes], expected)


def test_sweeps_that_are_none_are_refused() -> None:
    assert steps is not None
    assert steps.SWEEPS[0] == "none"
    for wrong in ("mmx", "", "SSE2"):
        with pytest.raises(ValueError, match=f"no sweeps by {wrong!r} here"):
            steps.sweep_by(wrong)
    with pytest.raises(TypeError):
        steps.sweep_by(3)


def test_steps_that_are_none_are_refused(members: Members) -> None:
    assert steps is not None
    arrivals, rail = members.boards[0].arrivals, steps.Rail(bytes(56), 1, 1, 1)
    for wrong in (
        (),
        (99,),
        (steps.COPY, (2, 0), (0, 0), 1),
        (steps.COPY, (0, 0), (0, 0), 1, 7),
        (steps.COPY, (0, 0), (0, 0), 1, -1),
        (steps.BOTH, (0, 0), (0, 0), 1),
        (steps.BOTH, (0, 0), (2, 0), (0, 0), 1, Way.IN),
        (steps.BOTH, (0, 0), (0, 0), (0, 0), 1, Way.PAST),
        (steps.BESIDE, (0, 0), (0, 0), 1, 3),  # beside nothing
        (steps.READ, 7, 1, (0, 0), (0, 0), 1, False),
        (steps.READ, 1, 1, (0, 0), (2, 0), 1, False),
        (steps.SHARED, (2, 0), True),
        (steps.STORE, 8, bytes(16), 0, ((2, 0),)),
        (steps.STORE, 8, bytes(16), 1, ((0, 0), (0, 0))),
        (steps.STORE, 8, bytes(16), 17, ()),
        (steps.LENT, 8, b"", 1, 1, 0),  # over a tensor of the call
        (steps.LENT, 8, b"", 2, 1, 0),  # of which none was announced
        (steps.LENT, 8, b"", 2, -1, 0),
        (steps.SEND, rail, bytes(56), (2, 0), 1, 0),
        (steps.RECEIVE, rail, bytes(56), 8, 1, 0),
        (steps.SEND, rail, bytes(55), (0, 0), 1, 0),
        (steps.FENCE,),
        (steps.NOTE,),
        (steps.STORE, 8),
    ):
        with pytest.raises((TypeError, ValueError, IndexError)):
            steps.Script(arrivals, (wrong,), nothing, nothing, 1, 1)
    with pytest.raises(ValueError, match="no fold sum_of_all"):
        steps.Script(
            arrivals, ((steps.FOLD, "sum_of_all", 1.0, (0, 0), ((0, 0),), 4),), nothing, nothing, 1, 0
        )
    script = steps.Script(arrivals, ((steps.STOP,),), nothing, nothing, 1, 1)
    with pytest.raises(IndexError):
        script.run(operation(0), [torch.zeros(1)], [torch.zeros(1)], 0, 2)


def test_a_script_keeps_nothing_of_its_calls(members: Members) -> None:
    source, result, call = torch.zeros(4), torch.zeros(4), operation(0)
    script = script_of(members.boards[0], [copying(nothing, (1, 0), (0, 0), 16)], 1, 1)
    assert script is not None
    inputs, outputs = [source], [result]
    before = [sys.getrefcount(each) for each in (source, result, call, inputs, outputs)]
    for _ in range(1000):
        script.run(call, inputs, outputs, 0, 0)
    assert [sys.getrefcount(each) for each in (source, result, call, inputs, outputs)] == before


def test_blocks_that_are_folded_consist_of_whole_elements() -> None:
    assert [fold_bytes(ranks) >> 10 for ranks in (2, 3, 4, 5, 8, 16, 64)] == [256, 128, 128, 64, 64, 64, 64]
