"""Python's part in plans inside a host: long waits, and the steps that the core leaves to its caller.

`Host` is what a script (`dist2.operation.engine`) calls. Each such step has a payload, an object below, whose
``do`` is called with the host, the call, the script, and the number of the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

from dist2.backends.socket.memory import tensor_at
from dist2.backends.socket.sizes import BESIDE_NOTE, compare_sizes
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.exposed import Exposed, Recall
from dist2.operation import engine
from dist2.operation.record import Operation

NEXT: int = engine.NEXT
RETRY: int = engine.RETRY
RESTART: int = engine.RESTART
LEAVE: int = engine.LEAVE

MAPPED_NOTE = 1 << 33
"""Published in place of the number of blocks by a rank whose tensors are mapped. No rank has so many."""

Script = Any
"""`dist2.operation.engine.Script`."""


class Payload(Protocol):
    """A step that the core leaves to its caller."""

    def do(self, host: Host, operation: Operation, script: Script, at: int) -> int:
        """Do the step; return how the script goes on: `NEXT`, `RETRY`, `RESTART` or `LEAVE`."""
        ...


class Host:
    """What the scripts of one group call.

    Args:
        board: The group's board.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.exposed = Exposed(board)
        self.recall = Recall(board)
        self.wait = board.wait
        self.attend = None
        self.log_call = board.log_call

    def prepare(self, operation: Operation, script: Script) -> None:
        """Find the regions of all members, before the first run of a script."""
        board = self.board
        board.meet(operation, fence_follows=script.plan.gathers)
        board.arrivals.one_process = all(each.neighbour.pid == os.getpid() for each in board.members)

    def do(self, operation: Operation, script: Script, at: int, payload: Payload) -> int:
        """Do a step."""
        return payload.do(self, operation, script, at)

    def do_extra(self, operation: Operation, turns: int) -> None:
        """Pass the fences of blocks that only other ranks have."""
        board = self.board
        for _ in range(turns):
            board.turn = 1 - board.turn
            board.fence(operation)

    def fail(self, first: int, error: BaseException) -> None:
        """Withdraw the memory that this member exposed; see `Recall.give_up`."""
        self.recall.give_up(first, error)


@attrs.frozen
class FoldByTorch:
    """Folds vectors that the core cannot fold.

    Attributes:
        function: Combines tensors into one.
        dtype: Of the elements.
        numel: How many there are.
    """

    function: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    dtype: torch.dtype
    numel: int

    def do(self, host: Host, operation: Operation, script: Script, at: int) -> int:
        target, *sources = [tensor_at(each, self.dtype, self.numel) for each in script.addresses(at)]
        self.function(target, sources)
        return NEXT


@attrs.frozen
class GivenUp:
    """Raises the reason if a member has given up the operation."""

    def do(self, host: Host, operation: Operation, script: Script, at: int) -> int:
        host.recall.check(operation)
        return NEXT


@attrs.frozen
class FindMemory:
    """Maps the memory that members expose, where it is not mapped yet."""

    def do(self, host: Host, operation: Operation, script: Script, at: int) -> int:
        for member in host.board.members:
            host.exposed.find(member)
        return RETRY


@attrs.frozen
class CheckSizes:
    """Compares the sizes of an exchange, and decides what all ranks run if they have chosen differently.

    A rank whose tensors are all mapped runs its mapped plan, another one its slots plan, whose first block is
    in its slot by now. If there are both, all begin the slots plan anew.

    Attributes:
        number: The number that this rank has published.
    """

    number: int

    def do(self, host: Host, operation: Operation, script: Script, at: int) -> int:
        board, own = host.board, self.number & BESIDE_NOTE
        others = [each & BESIDE_NOTE for each in board.noted()]
        compare_sizes(board, operation, self.number)
        if own == MAPPED_NOTE:
            if all(each == MAPPED_NOTE for each in others):
                return NEXT
            board.turn = 1 - board.turn  # the others have used a half of their slots
            return LEAVE
        if MAPPED_NOTE in others:
            return RESTART
        script.extra_turns = max(others) - own
        return NEXT
