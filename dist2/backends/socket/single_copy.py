"""Runs schedules whose steps reach into the tensors of other ranks: no slots, no blocks.

What is mapped in this process (tensors of `dist2.shared_empty`, ranks that are threads) is folded and copied
straight out of. What only the kernel can reach is copied straight, and folded in blocks that stay in the
cache. If something cannot be reached, all ranks find out together and run another program.

All that a call does is worked out once for each set of addresses, its caller's and those that the others
lend (see `reaching`): a call on the tensors of an earlier one looks up what to do and does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Fence, Schedule, Step
from dist2.backends.socket.compiler import Layout
from dist2.backends.socket.flat import LENDING, addresses
from dist2.backends.socket.reaching import Action, Reach, Scratch
from dist2.backends.socket.script import Folding
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport.board import Board
from dist2.backends.socket.transport.lending import Lending, Tables
from dist2.backends.socket.transport.recall import Recall
from dist2.operation import Operation

MAX_KEPT = 16
"""For how many sets of addresses a program remembers what to do; where there are more, it starts over."""

Tensors = Sequence[torch.Tensor]
Actions = tuple[Action, ...]


class _Caller:
    """What is known about calls on the same memory of this process.

    Attributes:
        own: Where the caller's parts lie.
        before: What comes before the first fence.
        lends: What the others may reach.
        after: What comes after it, by what the others lend; None: it cannot be reached.
    """

    __slots__ = ("after", "before", "lends", "own")

    def __init__(self, own: dict[Buffer, list[int]], before: Actions, lends: tuple[int, ...]) -> None:
        self.own = own
        self.before = before
        self.lends = lends
        self.after: dict[Tables, Actions | None] = {}


class SingleCopyProgram:
    """An algorithm that lends memory, made ready for one signature.

    Args:
        board: The group's shared memory.
        lending: Of that board.
        scratch: Of the group.
        schedule: What this rank does.
        layout: How the tensors are cut into parts.
        fold: For reductions.
        by_kernel: Whether the kernel may move what is not mapped.
        mapped: Whether it is worth finding out if tensors are mapped where the kernel moves nothing.
        otherwise: What runs where memory cannot be reached.
    """

    def __init__(
        self,
        board: Board,
        lending: Lending,
        scratch: Scratch,
        schedule: Schedule,
        layout: Layout,
        fold: Folding | None,
        by_kernel: bool,
        mapped: bool,
        otherwise: Program,
    ) -> None:
        self._board = board
        self._lending = lending
        self._itemsize = layout.dtype.itemsize
        self._inputs, self._outputs = layout.inputs, layout.outputs
        self._recall = Recall(board)
        self._reach = Reach(board, self._recall, scratch, layout, fold)
        self._lends = schedule.lends
        self._by_kernel = by_kernel
        self._mapped = mapped
        self._otherwise = otherwise
        first = next(at for at, step in enumerate(schedule.steps) if isinstance(step, Fence))
        self._before: Sequence[Step] = schedule.steps[:first]
        self._after: Sequence[Step] = schedule.steps[first + 1 :]
        self._callers: dict[tuple[int, ...], _Caller] = {}

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        if self._lending.by_kernel is False and not self._mapped:
            self._otherwise(operation, inputs, outputs)
            return
        where = tuple([tensor.data_ptr() for tensor in inputs])
        if outputs is not inputs:
            where += tuple([tensor.data_ptr() for tensor in outputs])
        caller = self._callers.get(where)
        if caller is None:
            self._board.meet(operation)
            caller = self._meet_caller(where, inputs, outputs)
        for action in caller.before:
            action(operation)
        first = self._board.phase + 1
        self._lending.offer(caller.lends)
        try:
            actions = self._agreed(caller, operation)
            for action in actions or ():
                action(operation)
        except BaseException:
            self._recall.give_up(first)
            raise
        if actions is None:
            self._otherwise(operation, inputs, outputs)

    def _agreed(self, caller: _Caller, operation: Operation) -> Actions | None:
        """Wait for all; return what to do, or None if somebody cannot do its part."""
        if not self._everybody_lends(operation):
            return None
        tables = self._lending.tables()
        try:
            return caller.after[tables]
        except KeyError:
            return self._bind(caller, tables)

    def _everybody_lends(self, operation: Operation) -> bool:
        """Wait for all; return whether they run this program as well."""
        self._recall.fence(operation)
        return True

    def _meet_caller(self, where: tuple[int, ...], inputs: Tensors, outputs: Tensors) -> _Caller:
        own = {
            Buffer.INPUT: addresses(inputs, self._inputs, self._itemsize),
            Buffer.OUTPUT: addresses(outputs, self._outputs, self._itemsize),
        }
        before = self._reach.bind(self._before, own, {})
        lends = () if self._lends is None else tuple(own[self._lends])
        if len(self._callers) >= MAX_KEPT:
            self._callers.clear()
        caller = self._callers[where] = _Caller(own, before, lends)
        return caller

    def _bind(self, caller: _Caller, tables: Tables) -> Actions | None:
        lent = self._lending.reached(tables, self._by_kernel)
        actions = None if lent is None else self._reach.bind(self._after, caller.own, lent)
        if len(caller.after) >= MAX_KEPT:
            caller.after.clear()
        caller.after[tables] = actions
        return actions


class ExchangeProgram(SingleCopyProgram):
    """`all_to_all`, where each rank knows its own sizes alone: some may run a `FlatProgram` instead.

    All say in the first fence what they do; if they differ, all go through slots.
    """

    def _everybody_lends(self, operation: Operation) -> bool:
        board = self._board
        board.note(LENDING)
        self._recall.fence(operation)
        if all(noted == LENDING for noted in board.noted()):
            return True
        board.turn = 1 - board.turn  # the others have used a half of their slots
        return False
