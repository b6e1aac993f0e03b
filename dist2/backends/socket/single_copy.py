"""Runs schedules whose steps reach into the tensors of other ranks: no slots, no blocks.

What is mapped in this process (tensors of `dist2.shared_empty`, ranks that are threads) is folded and copied
straight out of. What only the kernel can reach is copied straight, and folded in blocks that stay in the
cache. If something cannot be reached, all ranks find out together and run another program.

All that a call does is worked out once for each set of addresses, its caller's and those that the others
lend (see `reaching`): a call on the tensors of an earlier one looks up what to do and does it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Fence, Schedule, Step
from dist2.backends.socket.compiler import Layout
from dist2.backends.socket.flat import LENDING, addresses
from dist2.backends.socket.reaching import Reach, Scratch
from dist2.backends.socket.script import Bound, Folding, Script, expecting, run_bound, script_of
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport.board import Board
from dist2.backends.socket.transport.lending import Lending, Tables
from dist2.backends.socket.transport.recall import Recall
from dist2.operation import Operation

MAX_KEPT = 16
"""For how many sets of addresses a program remembers what to do; where there are more, it starts over."""

Tensors = Sequence[torch.Tensor]


class _Agreement:
    """What to do once the members have come to the first fence and lend what they lend.

    Attributes:
        tables: What they lend.
        bound: All steps: those before the first fence, the fence, a look at the tables, those after it.
            None: it cannot be reached.
        behind: Number of the first step behind that look.
        script: The same in C, where there is one.
    """

    __slots__ = ("behind", "bound", "script", "tables")

    def __init__(
        self, tables: Tables, bound: tuple[Bound, ...] | None, behind: int, script: Script | None
    ) -> None:
        self.tables = tables
        self.bound = bound
        self.behind = behind
        self.script = script


class _Caller:
    """What is known about calls on the same memory of this process.

    Attributes:
        own: Where the caller's parts lie.
        before: What comes before the first fence.
        lends: What the others may reach.
        agreements: By the parity of the first fence, and by what the others lend.
        likely: By that parity: the last agreement, if it has a script.
    """

    __slots__ = ("agreements", "before", "lends", "likely", "own")

    def __init__(
        self, own: dict[Buffer, list[int]], before: tuple[Bound, ...], lends: tuple[int, ...]
    ) -> None:
        self.own = own
        self.before = before
        self.lends = lends
        self.agreements: tuple[dict[Tables, _Agreement], ...] = ({}, {})
        self.likely: list[_Agreement | None] = [None, None]


class _Differs(Exception):  # noqa: N818 - no error
    """Somebody does not do what it did the last time."""


def _differs(operation: Operation) -> None:
    raise _Differs


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
        first = self._board.phase + 1
        self._lending.offer(caller.lends)
        try:
            agreed = self._run(caller, operation, first & 1)
        except BaseException as error:
            self._recall.give_up(first, error)
            raise
        if not agreed:
            self._otherwise(operation, inputs, outputs)

    def _run(self, caller: _Caller, operation: Operation, parity: int) -> bool:
        """Do all steps; False if somebody cannot, after the first fence."""
        self._say()
        likely = caller.likely[parity]
        if likely is None:
            run_bound(caller.before, None, operation)
            self._recall.fence(operation)
        else:
            assert likely.bound is not None  # or it would have no script
            try:
                run_bound(likely.bound, likely.script, operation)
            except _Differs:
                pass
            else:
                return True
        if not self._all_say():
            return False
        agreement = self._agreement(caller, parity)
        if agreement.script is not None:
            caller.likely[parity] = agreement
        if agreement.bound is None:
            return False
        run_bound(agreement.bound, agreement.script, operation, agreement.behind)
        return True

    def _say(self) -> None:
        """Tell the others with the first fence that this member runs this program, if they may doubt it."""

    def _all_say(self) -> bool:
        """Whether the others said so as well; they have come to the first fence."""
        return True

    def _looks(self, parity: int) -> list[Bound]:
        """Return what looks whether all said so; it raises `_Differs`."""
        return []

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

    def _agreement(self, caller: _Caller, parity: int) -> _Agreement:
        """Return what to do with what all lend now."""
        tables = self._lending.tables()
        known = caller.agreements[parity]
        found = known.get(tables)
        if found is None:
            if len(known) >= MAX_KEPT:
                known.clear()
            found = known[tables] = self._bind(caller, parity, tables)
        return found

    def _bind(self, caller: _Caller, parity: int, tables: Tables) -> _Agreement:
        lent = self._lending.reached(tables, self._by_kernel)
        if lent is None:
            return _Agreement(tables, None, 0, None)
        looks = self._looks(parity)
        places = self._lending.places(parity)
        looks += [expecting(_differs, at, tables[rank]) for rank, at in places.items()]
        head = (*caller.before, self._reach.fence(), *looks)
        bound = head + self._reach.bind(self._after, caller.own, lent)
        return _Agreement(tables, bound, len(head), script_of(self._board, bound))


class ExchangeProgram(SingleCopyProgram):
    """`all_to_all`, where each rank knows its own sizes alone: some may run a `FlatProgram` instead.

    All say in the first fence what they do; if they differ, all go through slots.
    """

    def _say(self) -> None:
        self._board.note(LENDING)

    def _all_say(self) -> bool:
        board = self._board
        if all(noted == LENDING for noted in board.noted()):
            return True
        board.turn = 1 - board.turn  # the others have used a half of their slots
        return False

    def _looks(self, parity: int) -> list[Bound]:
        board, said = self._board, LENDING.to_bytes(8, sys.byteorder)
        return [expecting(_differs, board.note_address(each.rank, parity), said) for each in board.members]
