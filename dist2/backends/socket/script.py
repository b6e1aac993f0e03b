"""`Script`: runs bound steps in C where possible.

A program on shared memory is a tuple of bound steps. A script does most of them in one call, without the
interpreter. A step that it cannot do (a fold by torch, a process that cannot be reached any more) stops it;
Python calls the closure of that step, and the script goes on behind it. So errors are handled in one place,
the closures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from dist2.backends.socket.bound_steps import Bound, Call, Tensors
from dist2.backends.socket.transport.boards.board import Board
from dist2.compiled import steps
from dist2.operation.signature import Operation
from dist2.runtime.torch_versions import TENSOR_EXCHANGE

Native = tuple[tuple[object, ...], ...]
"""The steps of a script, as C takes them."""


Script = steps.Script
NativeProgram = steps.Program


@cache
def _read_tensors() -> None:
    """Let scripts read a tensor's address without Python, if torch publishes a function for that."""
    if TENSOR_EXCHANGE is not None:
        steps.read_tensors(torch.Tensor, TENSOR_EXCHANGE)


def native_steps(bound: Sequence[Bound]) -> Native | None:
    """Return bound steps as a script takes them; None where Python does every step."""
    if all(each.native is None for each in bound):
        return None
    stop = (steps.STOP,)
    return tuple([stop if each.native is None else each.native for each in bound])


def script_of(
    board: Board, bound: Sequence[Bound], inputs: int = 0, outputs: int = 0, lent: int = 0
) -> Script | None:
    """Return a script of bound steps; None where Python does every step.

    Args:
        board: The board whose fences they pass, and in whose regions they may have places.
        bound: The steps.
        inputs: How many tensors a call reads.
        outputs: How many it writes.
        lent: How many parts others lend that steps have places in.
    """
    return script_of_native(board, native_steps(bound), inputs, outputs, lent)


def script_of_native(
    board: Board, native: Native | None, inputs: int, outputs: int, lent: int = 0
) -> Script | None:
    """Return a script of steps that `native_steps` has made; see `script_of`."""
    if native is None:
        return None
    _read_tensors()
    return Script(board.arrivals, native, board.wait, board.log_call, inputs, outputs, lent)


def native_program(
    board: Board,
    first: Callable[[Operation, Tensors, Tensors], None],
    stopped: Callable[[Operation, Tensors, Tensors, int, int, int], None],
    failed: Callable[[int, BaseException], None] | None = None,
    by_parity: bool = False,
) -> NativeProgram:
    """Return a program in C without scripts.

    Args:
        board: The board whose fences it passes.
        first: Called with the same arguments where there is no script.
        stopped: Called where a script stops: with the arguments, which of them it is, the number of the
            step that stopped it, and the number of the call's first fence.
        failed: Called with the number of the call's first fence and the exception of a script.
        by_parity: Scripts are for the parities of the first fence; otherwise for the halves of the slots.
    """
    return NativeProgram(board.arrivals, first, stopped, failed, by_parity)


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
