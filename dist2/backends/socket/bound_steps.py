"""`Bound`: a step of a plan between hosts, to run in Python or in a script of the core.

Between hosts a script may stop at any message, and Python goes on from there. So each step is there twice: as
a closure, with the addresses of a call, and as what adds it to a plan of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from dist2.backends.socket.host import Host
from dist2.backends.socket.lowering import Place, add_fold
from dist2.backends.socket.reduction import Folding
from dist2.backends.socket.transport.boards.board import Board
from dist2.compiled import steps
from dist2.operation.engine import Plan, Script

Tensors = Sequence[torch.Tensor]
Action = Callable[[Any], Any]


@attrs.frozen
class Bound:
    """A step made ready to run.

    Attributes:
        action: Does it on a call.
        add: Adds it to a plan; None: only Python can do it.
    """

    action: Action
    add: Callable[[Plan], None] | None = None


def copying(action: Action, dst: Place, src: Place, nbytes: int) -> Bound:
    """Bind a copy inside this process."""
    return Bound(action, lambda plan: plan.copy(dst, src, nbytes))


def folding(
    action: Action, fold: Folding, dtype: torch.dtype, dst: Place, srcs: Sequence[Place], numel: int
) -> Bound:
    """Bind a fold."""
    return Bound(action, lambda plan: add_fold(plan, fold, dtype, (dst, *srcs), numel))


def expecting(action: Action, rank: int) -> Bound:
    """Bind a look whether a member still exposes memory: the action is called if it has given up."""
    return Bound(action, lambda plan: plan.lives(rank, None))


def finding(wanted: Sequence[tuple[int, int]], parity: int) -> Bound:
    """Bind a look for memory that members expose: a rank and a part each, and the parity of the fence."""
    return Bound(_never, lambda plan: plan.take(wanted, None, parity))


def reading(action: Action, pid: int, pidfd: int, dst: Place, src: Place, nbytes: int) -> Bound:
    """Bind a read of another process's memory by the kernel."""
    reader = steps.Reader(pid, pidfd)
    return Bound(action, lambda plan: plan.read(reader, dst, src, nbytes))


def moving(action: Action, mover: object, place: Place, nbytes: int, number: int, sends: bool) -> Bound:
    """Bind a message over a rail; see `transport.messages.rails`."""
    return Bound(action, lambda plan: plan.outside(mover, place, nbytes, number, sends))


def _never(operation: object) -> None:
    raise AssertionError("exposed memory does not change before the last fence")


def script_of(board: Board, host: Host, bound: Sequence[Bound], tensors: int) -> Script | None:
    """Return a script of steps, which stops at those that only Python can do; None if it would do none.

    Args:
        board: The board of this host.
        host: What the script calls.
        bound: The steps, with places in the tensors of a call and in memory that others expose.
        tensors: How many a call has.
    """
    if all(each.add is None for each in bound):
        return None
    plan = Plan(board.rank, (), [None] * tensors)
    for each in bound:
        if each.add is None:
            plan.caller(None)
        else:
            each.add(plan)
    return Script(board.arrivals, plan.seal(), host)
