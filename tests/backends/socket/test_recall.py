"""Giving up an operation that lends memory, with members as threads."""

from __future__ import annotations

import threading
import time

import pytest
from support.boards import Members, operation, pass_fence
from support.threads import ends_of
from support.time_limits import in_time

from dist2 import OperationTimeoutError, PeerLostError
from dist2.backends.socket.transport.boards.exposed import PATIENCE_S, Recall

SLACK_S = 0.05


def test_who_comes_late_uses_nothing_of_who_gave_up() -> None:
    members = Members(3)
    gave_up = threading.Barrier(3, timeout=10)
    waited_s = []

    def early(rank: int) -> None:
        board, call = members.boards[rank], operation(rank, timeout_s=0.1)
        board.meet(call)
        with pytest.raises(OperationTimeoutError):
            board.fence(call)
        start = time.monotonic()
        Recall(board).give_up(board.phase, TimeoutError("too late"))
        waited_s.append(time.monotonic() - start)
        gave_up.wait()

    def late() -> None:
        board, call = members.boards[2], operation(2)
        board.meet(call)
        gave_up.wait()
        with pytest.raises(PeerLostError, match="gave up"):
            board.fence(call)  # the words of the others are there
            Recall(board).check(call)

    assert ends_of(lambda: early(0), lambda: early(1), late) == [None, None, None]
    members.close()
    in_time(max(waited_s), SLACK_S)  # no member can have passed


@pytest.mark.parametrize("ends", ["at the next fence", "by giving up", "never"])
def test_who_passed_before_is_waited_for(ends: str) -> None:
    members = Members(2)
    inside = threading.Event()
    times: dict[str, float] = {}

    def user() -> None:
        board, call = members.boards[0], operation(0)
        pass_fence(board, call)
        inside.set()
        time.sleep(0.05)  # it reads the other's memory
        times["done"] = time.monotonic()
        if ends == "at the next fence":
            with pytest.raises(OperationTimeoutError):
                board.fence(operation(0, timeout_s=0.01))
        elif ends == "by giving up":
            Recall(board).announce("it was too late")
        else:
            time.sleep(2 * PATIENCE_S)

    def owner() -> None:
        board = members.boards[1]
        pass_fence(board, operation(1))
        inside.wait(10)
        start = time.monotonic()
        Recall(board).give_up(board.phase, TimeoutError("too late"))
        times["back"] = time.monotonic()
        times["waited"] = times["back"] - start

    assert ends_of(user, owner) == [None, None]
    members.close()
    assert times["back"] >= times["done"]
    in_time(times["waited"], PATIENCE_S + SLACK_S)
    assert ends != "never" or times["waited"] >= PATIENCE_S


def test_who_has_not_come_to_the_second_fence_may_still_be_at_it() -> None:
    members = Members(3)

    def pass_one_and_wait(rank: int) -> None:
        board = members.boards[rank]
        pass_fence(board, operation(rank))
        first = board.phase
        call = operation(rank, timeout_s=0.1)
        with pytest.raises(OperationTimeoutError):
            board.fence(call)
        start = time.monotonic()
        Recall(board).give_up(first, TimeoutError("too late"))
        # Rank 2 passed the first fence, and may use the memory until it comes to the second.
        assert time.monotonic() - start >= PATIENCE_S

    assert ends_of(
        lambda: pass_one_and_wait(0),
        lambda: pass_one_and_wait(1),
        lambda: pass_fence(members.boards[2], operation(2)),
    ) == [None, None, None]
    members.close()
