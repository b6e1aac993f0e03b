"""Runs schedules whose steps read the tensors of other ranks: no slots, no blocks.

Memory that is mapped in this process (tensors of `dist2.shared_empty`, ranks that are threads) is folded and
copied in place. Memory that only the kernel can access is copied directly, and folded in blocks that stay in
the cache. If some memory cannot be accessed, all ranks determine that together and run another program.

The steps of a call are bound once (see `binding`). In C, the next call is expected to use the same kinds of
memory as the last one of its variant: its script checks that, and stops if it is not so.

In C, calls that move more than the near caches hold traverse the tensors forwards and backwards in turn (see
`mirroring`). Each rank chooses the direction by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.binding import MAX_KEPT, Binding, Bindings, Caller
from dist2.backends.socket.bound_steps import Call, Folding
from dist2.backends.socket.flat import LENDING, LENDING_MAPPED
from dist2.backends.socket.layout import Layout
from dist2.backends.socket.reaching import Reach, Scratch
from dist2.backends.socket.script import NativeProgram, native_program, run_bound
from dist2.backends.socket.sizes import BESIDE_NOTE, compare_sizes, note_of
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.lending import Lending
from dist2.backends.socket.transport.boards.recall import Recall
from dist2.operation.signature import Operation
from dist2.runtime.cache import keep

Tensors = Sequence[torch.Tensor]


class SingleCopyProgram:
    """An algorithm that exposes memory, prepared for one signature.

    Args:
        board: The group's shared memory.
        lending: That board's lending.
        scratch: The group's scratch memory.
        schedule: The steps of this rank.
        layout: How the tensors are cut into parts.
        fold: For reductions.
        by_kernel: Whether the kernel may move memory that is not mapped.
        mapped: Whether to test if tensors are mapped when the kernel moves nothing.
        swept: Whether to test it even where the kernel moves shorter tensors. Then the own part, which no
            other rank accesses, is left for later: mostly it goes through slots with the rest.
        otherwise: Runs if memory cannot be accessed.
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
        self._layout = layout
        self._recall = Recall(board)
        self._by_kernel = by_kernel
        self._mapped = mapped
        self._swept = swept
        self._otherwise = otherwise
        reach = Reach(board, self._recall, scratch, layout, fold, schedule.lends)
        self._bindings = Bindings(board, lending, reach, schedule, layout, swept, self._noted)
        self._met = False
        # By variant: the binding that the next call is expected to use. It has a script.
        self._likely: list[Binding | None] = [None] * self._bindings.variants
        # The last bindings with a script, by variant and by which exposed tensors were shared memory.
        self._latest: dict[tuple[int, tuple[bool, ...]], Binding] = {}
        self._native: weakref.ref[NativeProgram] | None = None  # it has this one

    @property
    def _noted(self) -> int | None:
        """The number published with the first fence by members that run this program."""
        return None

    def program(self) -> Program:
        """Return the callable in C, which calls this object until it has scripts."""
        native = native_program(self._board, self, self._attempt, self._recall.give_up, by_parity=True)
        self._native = weakref.ref(native)
        return native

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        if not self._met:
            self._board.meet(operation, fence_follows=True)  # or the alternative program waits for the rest
            self._met = True
        first = self._arrivals.phase + 1
        variants = range(first & 1, len(self._likely), 2)
        variant = next((each for each in variants if self._likely[each] is None), variants[0])
        self._attempt(operation, inputs, outputs, variant, 0, first)

    def _attempt(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, variant: int, at: int, first: int
    ) -> None:
        """Do the rest of a call, from the step at which the likely script stopped."""
        try:
            reached = self._run(operation, (inputs, outputs), variant, at)
        except BaseException as error:
            self._recall.give_up(first, error)
            raise
        if not reached:
            self._otherwise(operation, inputs, outputs)

    def _run(self, operation: Operation, tensors: Call, variant: int, at: int) -> bool:
        """Do all steps; False if a rank cannot: then nothing is done, or the first fence is passed."""
        likely = self._likely[variant]
        if likely is None or at < likely.fence:  # the caller's memory is of another kind than the last one's
            if not self._is_worth_a_fence():
                return False
            caller = self._bindings.caller(tensors)
            likely = self._latest.get((variant, caller.shared))
            if likely is not None and likely.script is not None:
                self._guess(likely, variant)
                at = likely.script.run(operation, *tensors, 0, 0)
            if likely is None or at < likely.fence:
                return self._find_out(caller, operation, tensors, variant)
        if at == len(likely.bound):
            return True
        if at < likely.behind:
            return self._go_on(self._bindings.caller(tensors), operation, tensors, variant)
        if not likely.reached:
            return False
        self._go_on_here(operation, tensors, variant, likely.by_kernel, at)
        return True

    def _find_out(self, caller: Caller, operation: Operation, tensors: Call, variant: int) -> bool:
        """Do all steps without a guess."""
        run_bound(self._bindings.before(caller, variant), None, operation, tensors)
        self._recall.fence(operation)
        return self._go_on(caller, operation, tensors, variant)

    def _is_worth_a_fence(self) -> bool:
        """Whether these tensors may be lent, for all that is known: equal on all members that run this."""
        kernel_moves = self._lending.by_kernel
        if kernel_moves is None:
            return True  # not known yet: a rank has to test it
        return self._by_kernel or self._swept if kernel_moves else self._mapped

    def _go_on(self, caller: Caller, operation: Operation, tensors: Call, variant: int) -> bool:
        """Do the steps after the first fence."""
        by_kernel = self._agreed(operation)
        if by_kernel is None:
            return False
        binding = self._bindings.binding(caller, variant, by_kernel)
        # Where the next call will not lend, a member with a script must not: others may have new tensors.
        if binding.script is not None and self._is_worth_a_fence():
            keep(self._latest, (variant, caller.shared), binding, MAX_KEPT)
            self._guess(binding, variant)
        if not binding.reached:
            return False
        at = binding.behind
        if binding.script is not None:
            at = binding.script.run(operation, *tensors, 0, at)
        if at < len(binding.bound):
            self._go_on_here(operation, tensors, variant, by_kernel, at)
        return True

    def _go_on_here(
        self, operation: Operation, tensors: Call, variant: int, by_kernel: bool, at: int
    ) -> None:
        """Do a step that a script has not done, and those behind it, on the tensors of this call."""
        here = self._bindings.binding_here(self._bindings.caller(tensors), variant, by_kernel)
        here.bound[at].action(operation)
        run_bound(here.bound, here.script, operation, tensors, at + 1)

    def _guess(self, binding: Binding, variant: int) -> None:
        """Have the next call of this variant do the same."""
        self._likely[variant] = binding
        if self._native is not None and (native := self._native()) is not None:
            native.scripts = tuple([None if each is None else each.script for each in self._likely])

    def _agreed(self, operation: Operation) -> bool | None:
        """Return whether the kernel may move memory that is not mapped, which all must see alike.

        They have come to the first fence. None: others run something else.

        Raises:
            MismatchError: The sizes of an exchange differ.
        """
        return self._by_kernel


class ExchangeProgram(SingleCopyProgram):
    """`all_to_all`, in which each rank knows its own sizes only: some may run a `FlatProgram` instead.

    All publish their choice with the first fence; if the choices differ, all use slots. They also do so if a
    rank requires mapped memory, and some memory is not mapped.
    """

    @property
    def _noted(self) -> int:
        inputs, outputs = self._layout.inputs.numels, self._layout.outputs.numels
        return (LENDING if self._by_kernel else LENDING_MAPPED) | note_of(self._board.rank, inputs, outputs)

    def _agreed(self, operation: Operation) -> bool | None:
        board = self._board
        noted = [each & BESIDE_NOTE for each in board.noted()]
        compare_sizes(board, operation, self._noted)
        if min(noted) >= LENDING:
            return self._by_kernel and LENDING_MAPPED not in noted
        board.turn = 1 - board.turn  # the others have used a half of their slots
        return None
