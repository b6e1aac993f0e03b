"""Runs schedules whose steps reach into the tensors of other ranks: no slots, no blocks.

What is mapped in this process (tensors of `dist2.shared_empty`, ranks that are threads) is folded and copied
straight out of. What only the kernel can reach is copied straight, and folded in blocks that stay in the
cache. If something cannot be reached, all ranks find out together and run another program.

All that a call does is worked out once for each set of addresses, its caller's and those that the others
lend (see `reaching`): a call on the tensors of an earlier one looks up what to do and does it. Where C runs
it, a call on any tensors does, as long as they can be reached in the same way.

Where C runs them, calls that move more than the caches nearby hold go through the tensors from one end and
from the other in turn (see `mirroring`). Which way is each rank's own affair. What is known of a call is kept
by its *course*: the parity of its first fence, which says where what is lent stands, and two more for the way
back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import attrs
import torch

from dist2.backends.socket.algorithms.mirroring import mirrored
from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Schedule, Step
from dist2.backends.socket.flat import LENDING, LENDING_MAPPED, addresses
from dist2.backends.socket.layout import Layout
from dist2.backends.socket.reaching import Reach, Scratch
from dist2.backends.socket.script import (
    Bound,
    Call,
    Folding,
    NativeProgram,
    Script,
    being_shared,
    expecting,
    finding,
    having_noted,
    native_program,
    noting,
    run_bound,
    script_of,
    storing,
)
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.lending import HEADER_BYTES, MAX_LENT, Lending, Tables
from dist2.backends.socket.transport.boards.recall import Recall
from dist2.operation import Operation
from dist2.shared_tensors import locator_of

MAX_KEPT = 64
"""For how many sets of addresses a program remembers what to do; where there are more, it starts over. With
scripts that can do all of it, addresses do not matter."""

LEAST_MIRRORED, MOST_MIRRORED = 256 << 10, 32 << 20
"""Calls that move so many bytes on a rank go to and fro. Less stays in the caches anyway; of more, hardly
anything does, and libc may want to copy past the caches what it is given in one go."""

Tensors = Sequence[torch.Tensor]


@attrs.frozen
class _Way:
    """What to do before the first fence, and behind it."""

    before: Sequence[Step]
    after: Sequence[Step]

    @classmethod
    def of(cls, schedule: Schedule, asks: bool) -> _Way:
        """Take a schedule apart; who only asks before the first fence does all at the second one."""
        steps = schedule.steps
        first = next(at for at, step in enumerate(steps) if isinstance(step, Fence))
        before, after = steps[:first], steps[first + 1 :]
        return cls((), (*after[:-1], *before, after[-1])) if asks else cls(before, after)


class _Caller:
    """What is known about calls on the same memory of this process.

    Attributes:
        where: Addresses of the tensors, the inputs first.
        own: Where the caller's parts lie.
        before: What comes before the first fence, each way.
        lends: What the others may reach.
        shared: Which of it is shared memory.
        agreements: By the course, and by what the others lend.
        latest: The last ones with a script, by course.
    """

    __slots__ = ("agreements", "before", "latest", "lends", "own", "shared", "where")

    def __init__(
        self,
        where: tuple[int, ...],
        own: dict[Buffer, list[int]],
        before: tuple[tuple[Bound, ...], ...],
        lends: tuple[int, ...],
    ) -> None:
        self.where = where
        self.own = own
        self.before = before
        self.lends = lends
        self.shared = tuple([locator_of((address,)) is not None for address in lends])
        self.agreements: tuple[dict[tuple[Tables, bool], _Agreement], ...] = tuple(
            [{} for _ in range(2 * len(before))]
        )
        self.latest: list[_Agreement | None] = [None] * (2 * len(before))


class _Agreement:
    """What to do once the members have come to the first fence and lend what they lend.

    Attributes:
        bound: All steps: a look at whether what is lent is shared memory, lending it, what comes before
            the first fence, the fence, a look at what the others lend, what comes after it.
        fence: Number of the fence among them.
        behind: Number of the first step behind the second look.
        reached: Whether what the others lend can be reached; if not, a step that stops is the last one.
        by_kernel: Whether the kernel may move what is not mapped.
        script: The same in C, where there is one: for any addresses.
    """

    __slots__ = ("behind", "bound", "by_kernel", "fence", "reached", "script")

    def __init__(
        self,
        bound: tuple[Bound, ...],
        fence: int,
        behind: int,
        reached: bool,
        by_kernel: bool,
        script: Script | None,
    ) -> None:
        self.bound = bound
        self.by_kernel = by_kernel
        self.fence = fence
        self.behind = behind
        self.reached = reached
        self.script = script


def _never(operation: Operation) -> None:
    raise AssertionError("a look that fails sends a program another way")


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
        swept: Whether it is so even where the kernel moves what is shorter. Then the own part, which nobody
            else reaches into, is left for later: most often it goes through slots with the rest.
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
        swept: bool,
        otherwise: Program,
    ) -> None:
        self._board = board
        self._arrivals = board.arrivals
        self._lending = lending
        self._itemsize = layout.dtype.itemsize
        self._inputs, self._outputs = layout.inputs, layout.outputs
        self._recall = Recall(board)
        self._reach = Reach(board, self._recall, scratch, layout, fold, schedule.lends)
        self._lends = schedule.lends
        self._by_kernel = by_kernel
        self._mapped = mapped
        self._swept = swept
        self._otherwise = otherwise
        self._ways = _ways(schedule, self._itemsize, swept)
        self._callers: dict[tuple[int, ...], _Caller] = {}
        # Those with whole scripts: by course, and by what is shared memory here and elsewhere.
        self._anywhere: tuple[dict[tuple[tuple[bool, ...], Tables, bool], _Agreement], ...] = tuple(
            [{} for _ in range(2 * len(self._ways))]
        )
        # The last ones with a script, by course.
        self._likely: list[_Agreement | None] = [None] * (2 * len(self._ways))
        self._native: weakref.ref[NativeProgram] | None = None  # it has this one

    def program(self) -> Program:
        """Return what to call: this, or what does the same in C."""
        native = native_program(self._board, self, self._stopped, self._recall.give_up, by_parity=True)
        if native is None:
            return self
        self._native = weakref.ref(native)
        return native

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        if not self._callers:
            self._board.meet(operation, fence_follows=True)  # or what runs otherwise waits for the rest
        first = self._arrivals.phase + 1
        courses = range(first & 1, len(self._likely), 2)
        course = next((each for each in courses if self._likely[each] is None), courses[0])
        self._attempt(operation, (inputs, outputs), course, None, first)

    def _stopped(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, course: int, at: int, first: int
    ) -> None:
        """Go on where the script for a course stopped."""
        self._attempt(operation, (inputs, outputs), course, at, first)

    def _attempt(self, operation: Operation, tensors: Call, course: int, at: int | None, first: int) -> None:
        """Do what is left of a call: all of it, or from a step of the likely script on."""
        try:
            agreed = self._run(operation, tensors, course, at)
        except BaseException as error:
            self._recall.give_up(first, error)
            raise
        if not agreed:
            self._otherwise(operation, *tensors)

    def _run(self, operation: Operation, tensors: Call, course: int, at: int | None) -> bool:
        """Do all steps; False if somebody cannot: then nothing is done, or the first fence is passed."""
        likely = self._likely[course]
        if at is None or likely is None or at < likely.fence:  # the tensors are not those of the last call
            likely = self._caller(tensors).latest[course]
            if likely is None or likely.script is None:
                return self._find_out(operation, tensors, course)
            at = likely.script.run(operation, *tensors, 0, 0)
            self._guess(likely, course)
        if at < likely.fence:
            return self._find_out(operation, tensors, course)
        if at == len(likely.bound):
            return True
        if at < likely.behind:
            return self._go_on(self._caller(tensors), operation, tensors, course)
        if not likely.reached:
            return False
        self._go_on_here(operation, tensors, course, likely.by_kernel, at)
        return True

    def _find_out(self, operation: Operation, tensors: Call, course: int) -> bool:
        """Do all steps without a guess."""
        if not self._is_worth_a_fence():
            return False
        caller = self._caller(tensors)
        self._lending.offer(caller.lends, operation)
        self._say(operation)
        run_bound(caller.before[course >> 1], None, operation, tensors)
        self._recall.fence(operation)
        return self._go_on(caller, operation, tensors, course)

    def _is_worth_a_fence(self) -> bool:
        """Whether these tensors may be lent, for all that is known: equal on all members that run this."""
        kernel_moves = self._lending.by_kernel
        if kernel_moves is None:
            return True  # not known yet: somebody has to ask
        return self._by_kernel or self._swept if kernel_moves else self._mapped

    def _go_on(self, caller: _Caller, operation: Operation, tensors: Call, course: int) -> bool:
        """Do what comes after the first fence."""
        by_kernel = self._agreed()
        if by_kernel is None:
            return False
        agreement = self._agreement(caller, tensors, course, by_kernel)
        # Where the next call will not lend, a member with a script must not: others may have new tensors.
        if agreement.script is not None and self._is_worth_a_fence():
            caller.latest[course] = agreement
            self._guess(agreement, course)
        if not agreement.reached:
            return False
        at = agreement.behind
        if agreement.script is not None:
            at = agreement.script.run(operation, *tensors, 0, at)
        if at < len(agreement.bound):
            self._go_on_here(operation, tensors, course, by_kernel, at)
        return True

    def _go_on_here(self, operation: Operation, tensors: Call, course: int, by_kernel: bool, at: int) -> None:
        """Do a step that a script has not done, and those behind it, on the tensors of this call."""
        here = self._agreement_here(self._caller(tensors), tensors, course, by_kernel)
        here.bound[at].action(operation)
        run_bound(here.bound, here.script, operation, tensors, at + 1)

    def _guess(self, agreement: _Agreement, course: int) -> None:
        """Have the next call of this course do the same."""
        self._likely[course] = agreement
        if self._native is not None and (native := self._native()) is not None:
            native.scripts = tuple([None if each is None else each.script for each in self._likely])

    def _say(self, operation: Operation) -> None:
        """Tell the others with the first fence that this member runs this program, if they may doubt it."""

    def _agreed(self) -> bool | None:
        """Return whether the kernel may move what is not mapped, which all must see alike.

        They have come to the first fence. None: others run something else.
        """
        return self._by_kernel

    def _says(self) -> list[Bound]:
        """Return what says so."""
        return []

    def _looks(self) -> list[Bound]:
        """Return what looks whether all said so."""
        return []

    def _caller(self, tensors: Call) -> _Caller:
        """Return what is known about calls on this memory."""
        where = tuple([tensor.data_ptr() for side in tensors for tensor in side])
        caller = self._callers.get(where)
        if caller is None:
            caller = self._meet_caller(where, *tensors)
        return caller

    def _meet_caller(self, where: tuple[int, ...], inputs: Tensors, outputs: Tensors) -> _Caller:
        own = {
            Buffer.INPUT: addresses(inputs, self._inputs, self._itemsize),
            Buffer.OUTPUT: addresses(outputs, self._outputs, self._itemsize),
        }
        before = tuple([self._reach.bind(way.before, own, {}) for way in self._ways])
        lends = () if self._lends is None else tuple(own[self._lends])
        if len(self._callers) >= MAX_KEPT:
            self._callers.clear()
        caller = self._callers[where] = _Caller(where, own, before, lends)
        return caller

    def _agreement(self, caller: _Caller, tensors: Call, course: int, by_kernel: bool) -> _Agreement:
        """Return what to do with what all lend now: its script does it here, its steps perhaps elsewhere."""
        known, key = self._anywhere[course], (caller.shared, self._lending.kinds(course & 1), by_kernel)
        found = known.get(key)
        if found is None:
            found = self._agreement_here(caller, tensors, course, by_kernel)
            if found.script is not None and all(each.native is not None for each in found.bound):
                if len(known) >= MAX_KEPT:
                    known.clear()
                known[key] = found
        return found

    def _agreement_here(self, caller: _Caller, tensors: Call, course: int, by_kernel: bool) -> _Agreement:
        """Return what to do with what all lend now, on these tensors."""
        key = self._lending.tables(course & 1), by_kernel
        known = caller.agreements[course]
        found = known.get(key)
        if found is None:
            if len(known) >= MAX_KEPT:
                known.clear()
            found = known[key] = self._bind(caller, tensors, course, *key)
        return found

    def _bind(
        self, caller: _Caller, tensors: Call, course: int, tables: Tables, by_kernel: bool
    ) -> _Agreement:
        lending, board, parity = self._lending, self._board, course & 1
        count = sum(map(len, tensors))
        lent = lending.reached(tables, by_kernel, count)
        before = [*self._offers(caller, parity), *self._says(), *caller.before[course >> 1]]
        looks = []
        for rank in [each.rank for each in board.members]:
            place, how = lending.place(rank, parity), tables[rank][:HEADER_BYTES]
            if lent is None:
                looks.append(expecting(_never, place, how))
            else:
                first, parts, shift = lent[rank].first, len(lent[rank].addresses), lent[rank].shift
                looks.append(finding(_never, place, how, first, parts, shift))
                count += parts
        head = [*before, self._reach.fence(), *self._looks(), *looks]
        behind = [Bound(_never)]
        if lent is not None:
            behind = [*self._reach.bind(self._ways[course >> 1].after, caller.own, lent)]
        bound = (*head, *behind)
        inputs, outputs = map(len, tensors)
        script = script_of(board, bound, inputs, outputs, count - inputs - outputs)
        return _Agreement(bound, len(before), len(head), lent is not None, by_kernel, script)

    def _offers(self, caller: _Caller, parity: int) -> list[Bound]:
        """Return what lends memory, and looks first whether it is of the same kind."""
        lending, lends = self._lending, caller.lends
        table, place = lending.table(lends), lending.place(self._board.rank, parity)
        offer = partial(lending.offer, lends)
        if self._lends is None or len(lends) > MAX_LENT:
            return [storing(offer, place, table)]
        parts = [self._reach.part_of_call(self._lends, part) for part in range(len(lends))]
        looks = [being_shared(_never, *each) for each in zip(parts, caller.shared, strict=True)]
        return [*looks, storing(offer, place, table, HEADER_BYTES, parts)]


def _ways(schedule: Schedule, itemsize: int, asks: bool) -> tuple[_Way, ...]:
    """Return the one way to run a schedule; or two, to be taken in turn."""
    moved = itemsize * sum(step.dst.numel for step in schedule.steps if isinstance(step, Copy))
    turned = mirrored(schedule) if LEAST_MIRRORED <= moved <= MOST_MIRRORED else None
    return tuple([_Way.of(each, asks) for each in (schedule, turned) if each is not None])


class ExchangeProgram(SingleCopyProgram):
    """`all_to_all`, where each rank knows its own sizes alone: some may run a `FlatProgram` instead.

    All say in the first fence what they do; if they differ, all go through slots. So they do if somebody only
    lends what is mapped, and something is not.
    """

    def _say(self, operation: Operation) -> None:
        self._board.note(operation, self._number)

    @property
    def _number(self) -> int:
        """What this member says."""
        return LENDING if self._by_kernel else LENDING_MAPPED

    def _agreed(self) -> bool | None:
        board = self._board
        noted = board.noted()
        if min(noted) >= LENDING:
            return self._by_kernel and LENDING_MAPPED not in noted
        board.turn = 1 - board.turn  # the others have used a half of their slots
        return None

    def _says(self) -> list[Bound]:
        return [noting(self._say, self._number)]

    def _looks(self) -> list[Bound]:
        return [having_noted(_never, self._number)]
