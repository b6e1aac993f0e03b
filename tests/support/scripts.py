"""Scripts of the core on boards whose members are threads, and a host that notes the steps left to Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dist2.backends.socket.overlap import TENSOR, Place
from dist2.backends.socket.transport.boards.board import Board
from dist2.operation.engine import NEXT, Plan, Script
from dist2.operation.record import Operation


class NotingHost:
    """What scripts call; notes it.

    Attributes:
        done: Each step that was left to it: its number and its payload.
        failures: The first fence and the error of each failed call.
        answers: How scripts go on after the next steps; empty: `NEXT`.
        act: Called with the script and the number of such a step.
        wait: Called where a member is late.

    Args:
        board: The board.
        one_process: All memory is mapped.
    """

    def __init__(self, board: Board, one_process: bool = True) -> None:
        self.board = board
        self.done: list[tuple[int, Any]] = []
        self.failures: list[tuple[int, BaseException]] = []
        self.answers: list[int] = []
        self.extra: list[int] = []
        self.act: Callable[[Any, int], object] | None = None
        self.wait: Callable[[Operation], None] = board.wait
        self.attend = None
        self.log_call = board.log_call
        self._one_process = one_process

    def prepare(self, operation: Operation, script: Any) -> None:
        self.board.meet(operation)
        self.board.arrivals.one_process = self._one_process

    def do(self, operation: Operation, script: Any, at: int, payload: Any) -> int:
        self.done.append((at, payload))
        if self.act is not None:
            self.act(script, at)
        return self.answers.pop(0) if self.answers else NEXT

    def do_extra(self, operation: Operation, turns: int) -> None:
        self.extra.append(turns)

    def fail(self, first: int, error: BaseException) -> None:
        self.failures.append((first, error))


def tensor(index: int, at: int = 0) -> Place:
    """Return a place in a tensor of a call."""
    return (TENSOR, index, at)


def plan_for(rank: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
    """Return an empty plan for calls with tensors like these."""
    return Plan(rank, [each.nbytes for each in inputs], [each.nbytes for each in outputs])


def script_on(board: Board, plan: Any, other: Any = None) -> tuple[Any, NotingHost]:
    """Return a script of a plan, which is sealed, and its host."""
    host = NotingHost(board)
    return Script(board.arrivals, plan.seal(), host, other), host
