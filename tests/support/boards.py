"""Boards of one group whose members are threads."""

from __future__ import annotations

import os
import time

import torch

from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import WORDS
from dist2.backends.socket.transport.boards.roster import Member
from dist2.backends.socket.transport.shared_memory import SharedHost
from dist2.operation.kinds import SUM, OpKind, Reduction
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature, TensorMeta


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
