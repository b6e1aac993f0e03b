"""`Script`: runs bound steps in C where possible.

A program on shared memory is a tuple of bound steps. To run it is to call their closures one after the other.
Where dist2 was built with its parts in C, a script does most of the same steps in one call, without the
interpreter. A step that it cannot do (a fold by torch, a process that cannot be reached any more) stops it;
Python calls the closure of that step, and the script goes on behind it. So errors are handled in one place,
the closures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch

from dist2 import compiled
from dist2.backends.socket.bound_steps import Bound, Call, Tensors
from dist2.backends.socket.transport.boards.board import Board
from dist2.operation.signature import Operation
from dist2.runtime.torch_versions import TENSOR_EXCHANGE

Native = tuple[tuple[object, ...], ...]
"""The steps of a script, as C takes them."""


class Script(Protocol):
    """Bound steps in C."""

    def run(self, operation: Operation, inputs: Tensors, outputs: Tensors, shift: int, first: int, /) -> int:
        """Run steps in order, until one that Python must do.

        Args:
            operation: The operation for the fences.
            inputs: The call's inputs, if steps have places in them.
            outputs: Likewise.
            shift: Added to all places in tensors, in bytes.
            first: Number of the first step to run.

        Returns:
            The number of the step to do in Python; behind the last: all are done.

        Raises:
            Dist2Error: As `Board.fence`.
        """


class NativeProgram(Protocol):
    """A program in C: runs one of a few scripts, or Python if there is none.

    Attributes:
        scripts: One for each half or parity, and possibly two more that do the same in another way. Then
            calls alternate between the two pairs.
    """

    scripts: tuple[Script | None, ...]

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors, /) -> None:
        """Run on contiguous tensors."""


@cache
def _read_tensors() -> None:
    """Let scripts read a tensor's address without Python, if torch publishes a function for that."""
    if compiled.steps is not None and TENSOR_EXCHANGE is not None:
        compiled.steps.read_tensors(torch.Tensor, TENSOR_EXCHANGE)


def native_steps(bound: Sequence[Bound]) -> Native | None:
    """Return bound steps as a script takes them; None where Python does every step, or there is no C."""
    steps = compiled.steps
    if steps is None or all(each.native is None for each in bound):
        return None
    stop = (steps.STOP,)
    return tuple([stop if each.native is None else each.native for each in bound])


def script_of(
    board: Board, bound: Sequence[Bound], inputs: int = 0, outputs: int = 0, lent: int = 0
) -> Script | None:
    """Return a script of bound steps.

    Args:
        board: The board whose fences they pass, and in whose regions they may have places.
        bound: The steps.
        inputs: How many tensors a call reads.
        outputs: How many it writes.
        lent: How many parts others lend that steps have places in.

    Returns:
        None without C, or where Python does every step.
    """
    return script_of_native(board, native_steps(bound), inputs, outputs, lent)


def script_of_native(
    board: Board, native: Native | None, inputs: int, outputs: int, lent: int = 0
) -> Script | None:
    """Return a script of steps that `native_steps` has made; see `script_of`."""
    steps = compiled.steps
    if native is None or steps is None or not isinstance(board.arrivals, steps.Arrivals):
        return None
    _read_tensors()
    script: Script = steps.Script(board.arrivals, native, board.wait, board.log_call, inputs, outputs, lent)
    return script


def native_program(
    board: Board,
    first: Callable[[Operation, Tensors, Tensors], None],
    stopped: Callable[[Operation, Tensors, Tensors, int, int, int], None],
    failed: Callable[[int, BaseException], None] | None = None,
    by_parity: bool = False,
) -> NativeProgram | None:
    """Return a program in C without scripts; None where there is no C.

    Args:
        board: The board whose fences it passes.
        first: Called with the same arguments where there is no script.
        stopped: Called where a script stops: with the arguments, which of them it is, the number of the
            step that stopped it, and the number of the call's first fence.
        failed: Called with the number of the call's first fence and the exception of a script.
        by_parity: Scripts are for the parities of the first fence; otherwise for the halves of the slots.
    """
    steps = compiled.steps
    if steps is None or not isinstance(board.arrivals, steps.Arrivals):
        return None
    program: NativeProgram = steps.Program(board.arrivals, first, stopped, failed, by_parity)
    return program


def run_bound(
    bound: Sequence[Bound],
    script: Script | None,
    operation: Operation,
    tensors: Call = ((), ()),
    first: int = 0,
) -> None:
    """Do steps from one on; their actions take the operation.

    Args:
        bound: All steps.
        script: The same in C.
        operation: The call.
        tensors: Its inputs and outputs, if steps have places in them.
        first: Number of the step to begin with.
    """
    at = first
    while at < len(bound):
        if script is not None:
            at = script.run(operation, *tensors, 0, at)
            if at == len(bound):
                return
        bound[at].action(operation)
        at += 1
