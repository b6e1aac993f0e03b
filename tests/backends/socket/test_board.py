"""Fences in shared memory, with members as threads: arrival, mismatch, absence, abort, reuse."""

from __future__ import annotations

import os
import select
import threading
import time

import pytest
from support.boards import Members, operation, pass_fence
from support.threads import ends_of
from support.time_limits import in_time

from dist2 import GroupAbortedError, MismatchError, OperationTimeoutError, PeerLostError
from dist2.backends.socket.transport.boards.arrivals import default_spins, lone_spins
from dist2.backends.socket.transport.boards.control_words import SLEEPING
from dist2.backends.socket.transport.boards.regions import slot_offset
from dist2.operation.kinds import MAX


def test_nobody_passes_before_all_are_here() -> None:
    members = Members(3)
    late = threading.Event()
    passed: list[int] = []

    def early(rank: int) -> None:
        pass_fence(members.boards[rank], operation(rank))
        assert late.is_set()
        passed.append(rank)

    def come_late() -> None:
        time.sleep(0.05)
        late.set()
        pass_fence(members.boards[2], operation(2))

    assert ends_of(lambda: early(0), lambda: early(1), come_late) == [None, None, None]
    assert sorted(passed) == [0, 1]
    members.close()


def test_many_fences_carry_data() -> None:
    members = Members(2)
    rounds = 2000

    def body(rank: int) -> None:
        board = members.boards[rank]
        call = operation(rank)
        board.meet(call)
        for count in range(rounds):
            turn = board.turn
            board.turn = 1 - turn
            board.regions.part(rank, slot_offset(turn), 8)[:] = (count * 2 + rank).to_bytes(8, "little")
            board.fence(call)
            other = bytes(board.regions.part(1 - rank, slot_offset(turn), 8))
            assert int.from_bytes(other, "little") == count * 2 + 1 - rank

    assert ends_of(lambda: body(0), lambda: body(1)) == [None, None]
    members.close()


def test_a_mismatch_is_told_to_everyone_with_both_sides() -> None:
    members = Members(3)
    calls = [operation(0), operation(1, reduction=MAX), operation(2)]
    outcomes = ends_of(*(lambda r=r: pass_fence(members.boards[r], calls[r]) for r in range(3)))
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, MismatchError), outcome
        assert outcome.expected is not None
        assert "op=max" in str(outcome)
        assert "op=sum" in str(outcome)
        assert set(outcome.actual) == ({1} if rank != 1 else {0, 2})
    members.close()


def test_a_timeout_names_the_absent() -> None:
    members = Members(3)
    start = time.monotonic()
    outcomes = ends_of(
        *(lambda r=r: pass_fence(members.boards[r], operation(r, timeout_s=0.3)) for r in (0, 1))
    )
    elapsed = time.monotonic() - start
    for outcome in outcomes:
        assert isinstance(outcome, OperationTimeoutError)
        assert outcome.missing == (2,)
        assert "rank 2 did not arrive in time (last seen at: rank 2: no operation of this group)" in str(
            outcome
        )
    members.close()
    assert elapsed >= 0.3
    in_time(elapsed, 0.6)


def test_leaving_frees_who_waits() -> None:
    members = Members(2)
    for rank in (0, 1):
        assert members.boards[rank].meeting.look_up()
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        members.boards[0].fence(operation(0))

    def leave() -> None:
        waiting.wait()
        members.boards[1].close()

    outcome, _ = ends_of(wait, leave)
    assert isinstance(outcome, PeerLostError)
    assert outcome.ranks == (1,)
    assert "left the group" in str(outcome)
    members.close()


def test_who_goes_to_sleep_sees_an_abort_that_did_not_see_it_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The member that aborts has found no nap to end, and the other one no abort before its nap."""
    members = Members(2)
    first, second = members.boards
    assert all(board.meeting.look_up() for board in (first, second))
    monkeypatch.setattr(second.roster, "_wake_others", lambda: None)
    monkeypatch.setattr(select, "poll", lambda: pytest.fail("it sleeps"))
    naps: list[int] = []

    def arrived() -> bool:
        naps.append(first.regions.words(0)[SLEEPING])
        if naps[-1]:
            second.abort(GroupAbortedError("aborted by the test"))
        return False

    with pytest.raises(PeerLostError):
        first._waiting.sleep_until(arrived, operation(0), lambda: [1])
    assert naps[-1]
    members.close()


@pytest.mark.parametrize("met", [True, False])
def test_abort_frees_who_waits_at_once(met: bool) -> None:
    members = Members(2)
    if met:
        members.boards[0].meeting.look_up()
    waiting = threading.Event()
    freed_at = 0.0
    aborted_at = 0.0

    def wait() -> None:
        nonlocal freed_at
        waiting.set()
        try:
            pass_fence(members.boards[0], operation(0))
        finally:
            freed_at = time.monotonic()

    def abort() -> None:
        nonlocal aborted_at
        waiting.wait()
        time.sleep(0.05)  # let it go to sleep in the kernel
        aborted_at = time.monotonic()
        members.boards[0].roster.abort(GroupAbortedError("aborted by the test"))

    outcome, _ = ends_of(wait, abort)
    assert isinstance(outcome, GroupAbortedError)
    members.close()
    in_time(freed_at - aborted_at, 0.1)


def test_memory_is_reused_only_when_all_have_closed() -> None:
    members = Members(2)
    calls = [operation(rank) for rank in (0, 1)]
    ends_of(*(lambda r=r: pass_fence(members.boards[r], calls[r]) for r in (0, 1)))
    first = members.boards[0].regions.own.offset
    members.boards[0].close()
    beside = members.board(0, 78)
    assert beside.regions.own.offset != first
    members.boards[1].close()
    after = members.board(0, 79)
    assert after.regions.own.offset == first
    beside.close()
    after.close()
    members.close()


def test_ranks_that_are_threads_or_too_many_do_not_spin() -> None:
    cores = len(os.sched_getaffinity(0))
    assert default_spins(2, {os.getpid()}, None) == 0
    assert default_spins(cores + 1, {1}, None) == 0
    assert default_spins(1, {1}, 20.0) > default_spins(1, {1}, 10.0) > 0


def test_ranks_that_are_too_many_look_for_messages_where_nobody_wants_their_core() -> None:
    assert lone_spins({os.getpid()}, None) == 0, "it would keep the interpreter lock"
    assert 0 < lone_spins({1}, None) < default_spins(1, {1}, None)
    assert lone_spins({1}, 1.0) == default_spins(1, {1}, 1.0)
    assert lone_spins({1}, 1000.0) == lone_spins({1}, None)
