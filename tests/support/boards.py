"""Boards of one group whose members are threads."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch

from dist2 import compiled
from dist2.backends.socket.transport.boards import board as board_module
from dist2.backends.socket.transport.boards.arrivals import AnyArrivals, Arrivals, new_arrivals
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import WORDS
from dist2.backends.socket.transport.boards.roster import Member
from dist2.backends.socket.transport.doorbell import Doorbell
from dist2.backends.socket.transport.shared_memory import SharedHost
from dist2.operation.kinds import SUM, OpKind, Reduction
from dist2.operation.signature import GroupInfo, Operation, Signature, TensorMeta

ARRIVALS = {"C": [False], "Python": [True], "both": [False, True]}
"""How the members of a board may come to fences: whether in Python, one member after the other."""


class Members:
    """The boards of one group, one a thread."""

    def __init__(self, count: int, context: int = 77) -> None:
        self.hosts = [SharedHost() for _ in range(count)]
        self.boards = [self.board(rank, context) for rank in range(count)]

    def board(self, rank: int, context: int) -> Board:
        members = [
            Member(other, self.hosts[rank].neighbour(str(other), os.getpid(), host.locators()))
            for other, host in enumerate(self.hosts)
            if other != rank
        ]
        return Board(self.hosts[rank], context, rank, members, spins=0)

    def close(self) -> None:
        for board in self.boards:
            board.close()
        for host in self.hosts:
            host.close()


def use_arrivals(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the members of boards come to fences in C, in Python, or every other one in each.

    Args:
        kind: Of `ARRIVALS`. The test is skipped if it needs parts in C that there are not.
    """
    if compiled.steps is None and kind != "Python":
        pytest.skip("dist2 was built without its parts in C")
    turns = itertools.cycle(ARRIVALS[kind])

    def made(rank: int, own: memoryview, doorbell: Doorbell, members: int, spins: int) -> AnyArrivals:
        if next(turns):
            return Arrivals(rank, own, spins, 200_000)
        return new_arrivals(rank, own, doorbell, members, spins)

    monkeypatch.setattr(board_module, "new_arrivals", made)


def words() -> memoryview:
    """Return a page of control words of a member, all 0."""
    return memoryview(bytearray(8 * WORDS)).cast("Q")


def operation(rank: int, numel: int = 4, reduction: Reduction = SUM, timeout_s: float = 10.0) -> Operation:
    info = GroupInfo("uid", "group", "", "socket", rank, (0, 1, 2))
    meta = TensorMeta((numel,), torch.float32)
    signature = Signature(OpKind.ALL_REDUCE, info, inputs=(meta,), outputs=(meta,), reduction=reduction)
    now = time.monotonic_ns()
    return Operation(signature, 1, now, now + int(timeout_s * 1e9), False)


def pass_fence(board: Board, call: Operation) -> None:
    board.meet(call)
    board.fence(call)
