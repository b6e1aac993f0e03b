"""Fences at which not all wait for all, with members as threads: ranks that are ahead, their data, their
wake-ups."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from support.boards import Members, operation
from support.scripts import script_on
from support.threads import ends_of

from dist2 import MismatchError, OperationTimeoutError, PeerLostError
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.call_log import CALL_LOG_BYTES, CallLog, read_call_log
from dist2.backends.socket.transport.boards.control_words import ALL, NOBODY, SLEEPING, WINDOW
from dist2.backends.socket.transport.boards.pieces import (
    LONGER,
    PIECE_BYTES,
    PIECES,
    TINY,
    TINY_BYTES,
    kind_for,
)
from dist2.operation.engine import WORDS_OF_CONTROL, Plan
from dist2.operation.kinds import MAX, OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature, TensorMeta


def claim(board: Board, call: Operation, kind: int) -> None:
    """Claim the next piece of a kind."""
    plan = Plan(board.rank, [], [])
    plan.claim(kind)
    script, _ = script_on(board, plan)
    script.run(call, [], [])


def sleeping(nap: int, whom: int, phase: int) -> int:
    """Return the word of a member that sleeps until one rank, or all, are at a fence: see `fences.c`."""
    table = WORDS_OF_CONTROL
    code = 1 if whom == ALL else whom + 2
    return nap << (table["WHOM_BITS"] + table["PHASE_BITS"]) | phase << table["WHOM_BITS"] | code


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(3)
    for board in made.boards:
        assert board.meeting.look_up()
    yield made
    made.close()


def arrive(board: Board, call: Operation, whom: int = NOBODY) -> None:
    """Come to the next fence."""
    board.fence(call, whom)


def test_who_waits_for_nobody_is_ahead_by_a_window_and_no_more(members: Members) -> None:
    board, call = members.boards[0], operation(0, timeout_s=0.2)
    for _ in range(WINDOW - 1):
        arrive(board, call)
    with pytest.raises(OperationTimeoutError) as caught:
        arrive(board, call)
    assert caught.value.missing == (1, 2)
    assert board.phase == WINDOW - 1


def test_who_waits_for_one_waits_for_no_other(members: Members) -> None:
    arrive(members.boards[0], operation(0))
    arrive(members.boards[1], operation(1), 0)
    with pytest.raises(OperationTimeoutError) as caught:
        arrive(members.boards[1], operation(1, timeout_s=0.1), 2)
    assert caught.value.missing == (2,)


def test_who_has_gone_on_is_named_and_told_at_its_next_fence(members: Members) -> None:
    first, second, _ = members.boards
    arrive(first, operation(0))
    with pytest.raises(MismatchError) as caught:
        arrive(second, operation(1, reduction=MAX), 0)
    assert caught.value.calls[0].reduction == "sum"
    assert "op=sum) #1" in caught.value.actual[0]
    with pytest.raises(MismatchError) as told:
        arrive(first, operation(0))
    assert told.value.calls[1].reduction == "max"
    assert told.value.expected == caught.value.actual[0]


def test_who_comes_second_sees_a_mismatch_though_it_does_not_wait(members: Members) -> None:
    arrive(members.boards[0], operation(0))
    with pytest.raises(MismatchError):
        arrive(members.boards[1], operation(1, reduction=MAX))
    outcomes = ends_of(*(lambda r=r: members.boards[r].fence(operation(r)) for r in (0, 2)))
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, MismatchError), (rank, outcome)
        assert outcome.calls[1].reduction == "max"


def test_who_waits_for_nobody_is_told_that_a_member_has_left(members: Members) -> None:
    board = members.boards[0]
    arrive(board, operation(0))
    members.boards[1].close()
    with pytest.raises(PeerLostError) as caught:
        arrive(board, operation(0))
    assert caught.value.ranks == (1,)


def test_a_member_that_has_left_after_its_part_is_no_loss(members: Members) -> None:
    arrive(members.boards[1], operation(1))
    members.boards[1].close()
    arrive(members.boards[0], operation(0))
    arrive(members.boards[2], operation(2), 0)


def test_sleepers_are_rung_by_whom_they_wait_for_and_once(members: Members) -> None:
    first, second, third = members.boards
    bell = select.poll()
    bell.register(members.hosts[2].doorbell.fileno(), select.POLLIN)

    def rung() -> bool:
        heard = bool(bell.poll(0))
        members.hosts[2].doorbell.bell.enter()
        members.hosts[2].doorbell.bell.leave()  # reads the rings
        return heard

    rung()  # for the members that have joined
    third._own[SLEEPING] = sleeping(1, 1, 1)
    arrive(first, operation(0))
    assert not rung()
    arrive(second, operation(1))
    assert rung()
    arrive(second, operation(1))
    assert not rung()  # for one nap once
    third._own[SLEEPING] = sleeping(2, ALL, 2)
    arrive(second, operation(1))
    assert not rung()  # the first is not there
    arrive(first, operation(0))
    assert rung()
    third._own[SLEEPING] = sleeping(3, ALL, 4)
    arrive(first, operation(0))
    arrive(second, operation(1))
    assert not rung()  # it waits for a later one
    third._own[SLEEPING] = 0


def test_pieces_are_used_again_once_all_are_done(members: Members) -> None:
    """Rank 0 sends to all, or all send to it, or all wait for all: a fast rank must not overwrite unread
    data."""
    rounds = random.Random(5)
    plan = [(rounds.randrange(4), rounds.randrange(3), rounds.random() < 0.5) for _ in range(1500)]

    def body(rank: int) -> None:
        board, call, idle = members.boards[rank], operation(rank), random.Random(rank)
        for number, (what, root, tiny) in enumerate(plan):
            if idle.random() < 0.01:
                time.sleep(0.0005)
            if what == 0:
                board.fence(call)
                continue
            claim(board, call, TINY if tiny else LONGER)
            at = board.arrivals.slot
            own = board.regions.part(rank, at, 8)
            if what == 1 or rank == root:
                own[:] = (number << 8 | rank).to_bytes(8, "little")
            waits = what == 1 and rank == root
            arrive(board, call, ALL if waits else NOBODY if what == 1 or rank == root else root)
            givers = range(3) if waits else () if what == 1 or rank == root else (root,)
            for giver in givers:
                found = int.from_bytes(board.regions.part(giver, at, 8), "little")
                assert found == number << 8 | giver, (rank, number, giver)

    assert ends_of(*(lambda r=r: body(r) for r in range(3))) == [None, None, None]


def test_notes_stand_until_all_have_read_them(members: Members) -> None:
    """A member that waits for none at the second fence must not overwrite its note for the first."""
    late = threading.Event()

    def fast() -> None:
        board = members.boards[0]
        board.fence(operation(0), number=11)
        arrive(board, operation(0))
        late.set()
        board.fence(operation(0), number=22)

    def slow(rank: int) -> None:
        board = members.boards[rank]
        board.fence(operation(rank))
        late.wait(5)
        time.sleep(0.02)
        assert 11 in board.noted()
        arrive(board, operation(rank))
        board.fence(operation(rank))
        assert 22 in board.noted()

    assert ends_of(fast, lambda: slow(1), lambda: slow(2)) == [None, None, None]


def test_all_members_claim_the_same_pieces(members: Members) -> None:
    kinds = [TINY, LONGER, TINY, TINY, LONGER] * 20

    def body(rank: int, claimed: list[int]) -> None:
        board, call = members.boards[rank], operation(rank)
        for each in kinds:
            claim(board, call, each)
            claimed.append(board.arrivals.slot)
            board.fence(call)

    claims: list[list[int]] = [[], [], []]
    assert ends_of(*(lambda r=r: body(r, claims[r]) for r in range(3))) == [None, None, None]
    assert claims[0] == claims[1] == claims[2]
    assert len(set(claims[0])) == sum(row.count for row in PIECES)


def test_pieces_lie_side_by_side() -> None:
    tiny, longer = PIECES
    assert (tiny.stride >= TINY_BYTES, longer.stride >= PIECE_BYTES, longer.base >= tiny.end) == (True,) * 3
    assert [kind_for(nbytes) for nbytes in (0, TINY_BYTES, TINY_BYTES + 1, PIECE_BYTES)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=str(PIECE_BYTES + 1)):
        kind_for(PIECE_BYTES + 1)


def test_the_call_log_says_what_was_called_until_there_are_too_many() -> None:
    memory = memoryview(bytearray(CALL_LOG_BYTES))
    own = CallLog(memory)
    info = GroupInfo("uid", "group", "", "socket", 0, (0, 1))

    def call(seq: int, root: int) -> Operation:
        meta = TensorMeta((root + 1,), torch.float32)
        signature = signatures.setdefault(
            root, Signature(OpKind.BROADCAST, info, (meta,), (meta,), root=root)
        )
        return Operation(signature, seq, 0, 0, False)

    signatures: dict[int, Signature] = {}
    words = [own.word(call(seq, seq % 5)) for seq in range(1, 300)]
    for seq, word in enumerate(words, 1):
        found = read_call_log(memory, word)
        assert found is not None
        assert (found.op, found.seq, found.root) == ("broadcast", seq, seq % 5)
        assert found.text == f"broadcast(float32[{seq % 5 + 1}], root={seq % 5}) #{seq}"
    for root in range(5, 200):
        own.word(call(300, root))
    assert read_call_log(memory, words[-1]) is None
    assert read_call_log(memory, 0) is None
