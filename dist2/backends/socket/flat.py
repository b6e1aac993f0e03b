"""Runs flat schedules: those whose steps are copies, folds and fences on shared memory.

A recipe (`flat_recipe`) has the steps for any board. A program runs them in order on one board, in one call
of a `script.Script` if there is one; block after block if an operation is larger than a slot. On pieces of
slots, one script does all blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from dist2.backends.socket.compiler import Action, Frame
from dist2.backends.socket.flat_recipe import BoundSteps, Counts, FlatRecipe
from dist2.backends.socket.layout import Layout, Parts
from dist2.backends.socket.script import NativeProgram, Script, native_program, script_of_native
from dist2.backends.socket.sizes import BESIDE_NOTE
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport.boards.board import Board
from dist2.operation.signature import Operation
from dist2.operation.storage import writable

LENDING = 1 << 32
"""Published instead of the number of blocks by a rank that prefers to expose its tensors: its slot is empty,
and ranks that have begun start over."""

LENDING_MAPPED = LENDING << 1
"""The same, if it requires that all exposed memory can be mapped. No rank has so many blocks."""

ROW = 16
"""Most blocks of the same length that one script does where the halves have turns."""

MAX_JOINED = 64
"""Blocks that one script does; with more of them the time of Python between two scripts is small."""

Tensors = Sequence[torch.Tensor]
Frames = Callable[[int], Frame]
"""Returns the positions of the parts of a step's block, given its number counted from the current one."""


class _Steps:
    """Steps on a board: those of a block, on one half of the slots or on a piece, or of several one by one.

    Args:
        board: The group's shared memory; its members must have met.
        steps: The steps to run.
        layout: How the tensors are cut into parts.
        blocks: The number of each step's block; by default they are all of the block that is run.

    Attributes:
        script: The steps in C, once they were prepared and where they can be.
    """

    def __init__(self, board: Board, steps: BoundSteps, layout: Layout, blocks: tuple[int, ...] = ()) -> None:
        self.script: Script | None = None
        self._board = board
        self._bound = steps.bound
        self._native = steps.native
        self._layout = layout
        self._blocks = blocks
        self._is_ready = False
        self._made: dict[int, Action] = {}

    def prepare(self) -> None:
        """Make the script, if there can be one; it is not before its half has its turn."""
        if not self._is_ready:
            layout = self._layout
            self.script = script_of_native(
                self._board, self._native, layout.inputs.tensors, layout.outputs.tensors
            )
            self._is_ready = True

    def run(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, shift: int, frames: Frames
    ) -> bool:
        """Run all steps; make frames only if Python has to run one of them.

        Returns:
            Whether Python ran none: then all members have noted the same as well.
        """
        self.prepare()
        at = 0 if self.script is None else self.script.run(operation, inputs, outputs, shift, 0)
        if at == len(self._bound):
            return True
        self.go_on(operation, inputs, outputs, shift, frames, at)
        return False

    def go_on(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, shift: int, frames: Frames, at: int
    ) -> None:
        """Do the step that the script stopped at, if it did, and those behind it."""
        made, framed = None, -1
        while at < len(self._bound):
            block = self._blocks[at] if self._blocks else 0
            if made is None or block != framed:
                made, framed = frames(block), block
            self._action(at)(made)
            at += 1
            if self.script is not None:
                at = self.script.run(operation, inputs, outputs, shift, at)

    def _action(self, at: int) -> Action:
        """Return a callable that does a step: made for the board when Python has to do it."""
        action = self._made.get(at)
        if action is None:
            action = self._made[at] = self._bound[at].action(self._board)
        return action


class FlatProgram:
    """A recipe on the board of a group.

    Args:
        board: The group's shared memory.
        recipe: The recipe to run.
    """

    def __init__(self, board: Board, recipe: FlatRecipe) -> None:
        self._board = board
        self._recipe = recipe
        self._layout = recipe.layout
        self._itemsize = recipe.layout.dtype.itemsize
        self._ready: dict[Counts, tuple[_Steps, _Steps]] = {}
        self._flat = False
        self._has_met = False
        self._whole: tuple[_Steps, _Steps] | None = None
        self._rows: dict[tuple[Counts, int, int], _Steps] = {}
        self._lengths: dict[int, int] = {}
        self._native: weakref.ref[NativeProgram] | None = None  # it has this one

    def program(self) -> Program:
        """Return the callable in C, which calls this object until one script covers a call."""
        # The halves have turns; on pieces, which each block claims, both scripts are one.
        native = native_program(self._board, self, self._go_on, by_parity=self._recipe.streams)
        self._native = weakref.ref(native)
        return native

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        if not self._has_met:
            self._board.meet(operation, fence_follows=not self._recipe.streams)
            self._whole = self._make_whole()
            self._has_met = True
        if self._whole is None:
            self._run_blocks(operation, inputs, outputs, 0, self._recipe.blocks)
            return
        steps = self._whole[self._turn()]
        steps.prepare()
        if self._native is not None and (native := self._native()) is not None:
            native.scripts = (self._whole[0].script, self._whole[1].script)
        frames = self._frames(operation, inputs, outputs)
        if not steps.run(operation, inputs, outputs, 0, frames) and self._recipe.uneven:
            self._run_blocks(operation, inputs, outputs, *self._after_first())

    def _make_whole(self) -> tuple[_Steps, _Steps] | None:
        """Return callables that run a call, by the half of the slots: one block, or all that C can join.

        Returns:
            None: blocks are run one by one.
        """
        recipe = self._recipe
        if recipe.blocks == 1:
            return self._block_of(0)
        if not recipe.streams or recipe.blocks > MAX_JOINED:
            return None
        joined = self._joined(0, recipe.blocks)
        joined.prepare()
        return None if joined.script is None else (joined, joined)

    def _go_on(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, turn: int, at: int, first: int
    ) -> None:
        """Do the steps that a script has left."""
        assert self._whole is not None  # it has run
        frames = self._frames(operation, inputs, outputs)
        self._whole[turn].go_on(operation, inputs, outputs, 0, frames, at)
        if self._recipe.uneven:
            self._run_blocks(operation, inputs, outputs, *self._after_first())

    def _run_blocks(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, index: int, blocks: int
    ) -> None:
        """Do the blocks from one on; if other ranks may have more, the first block shows it."""
        while index < blocks:
            is_first = self._recipe.uneven and index == 0
            count = 1 if is_first else self._alike(index, blocks)
            steps = self._block_of(index)[self._turn()] if count == 1 else self._row_of(index, count)
            frames = self._frames(operation, inputs, outputs, index)
            steps.run(operation, inputs, outputs, index * self._recipe.block * self._itemsize, frames)
            if is_first:
                index, blocks = self._after_first()
            else:
                index += count

    def _alike(self, index: int, blocks: int) -> int:
        """Return how many blocks of the same length from one on a script does."""
        recipe = self._recipe
        alike = self._lengths.get(index)
        if alike is None:
            counts, most = recipe.counts(index), MAX_JOINED if recipe.streams else ROW
            others = (count for count in range(1, most) if recipe.counts(index + count) != counts)
            alike = self._lengths[index] = next(others, most)
        return min(alike, blocks - index)

    def _row_of(self, index: int, count: int) -> _Steps:
        """Return the steps of several blocks that are alike."""
        turn = self._turn(count)
        key = self._recipe.counts(index), count, turn
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._joined(index, count, turn)
        return row

    def _joined(self, first: int, count: int, turn: int = 0) -> _Steps:
        blocks, bound = zip(*self._recipe.joined(first, count, turn), strict=True)
        return _Steps(self._board, BoundSteps.of(bound), self._layout, blocks)

    def _after_first(self) -> tuple[int, int]:
        """Return the block after the first one, and the number of blocks, from the others' numbers."""
        blocks, noted = self._recipe.blocks, [each & BESIDE_NOTE for each in self._board.noted()]
        return (0, blocks) if max(noted) >= LENDING else (1, max(blocks, *noted))

    def _turn(self, count: int = 1) -> int:
        """Return which of a block's steps to run: on which slot half, or on a piece that they claim.

        Args:
            count: Of the blocks that are run: those behind the first go on in turn.
        """
        board = self._board
        if self._recipe.streams:
            return 0
        turn = board.turn
        board.turn = (turn + count) % 2
        return turn

    def _block_of(self, index: int) -> tuple[_Steps, _Steps]:
        """Return a block's steps: for each slot half, or twice the same for a piece."""
        recipe = self._recipe
        counts = recipe.counts(index)
        found = self._ready.get(counts)
        if found is None:
            steps = recipe.steps(counts)
            self._flat = steps.flat
            one = _Steps(self._board, steps.halves[0], self._layout)
            other = one if recipe.streams else _Steps(self._board, steps.halves[1], self._layout)
            found = self._ready[counts] = (one, other)
        return found

    def _frames(self, operation: Operation, inputs: Tensors, outputs: Tensors, first: int = 0) -> Frames:
        """Return a callable that returns the frame of a block; blocks are counted from the one given."""
        return lambda number: self._frame(operation, inputs, outputs, first + number)

    def _frame(self, operation: Operation, inputs: Tensors, outputs: Tensors, index: int) -> Frame:
        recipe, layout = self._recipe, self._layout
        is_cut = recipe.blocks > 1 or index > 0
        start, stop = index * recipe.block, (index + 1) * recipe.block
        flat, shift = self._flat or is_cut, start * self._itemsize

        def parts_of(tensors: Tensors, parts: Parts) -> Tensors:
            found = tensors_of(tensors, parts, flat) if recipe.folds else ()
            return [part[start:stop] for part in found] if is_cut else found

        return Frame(
            operation,
            [address + shift for address in addresses(inputs, layout.inputs, self._itemsize)],
            [address + shift for address in addresses(outputs, layout.outputs, self._itemsize)],
            parts_of(inputs, layout.inputs),
            parts_of(outputs, layout.outputs),
        )


def addresses(tensors: Tensors, parts: Parts, itemsize: int) -> list[int]:
    """Return where each part begins."""
    if not parts.single:
        return [tensor.data_ptr() for tensor in tensors]
    if not tensors:
        return []
    place = tensors[0].data_ptr()
    found = []
    for numel in parts.numels:
        found.append(place)
        place += numel * itemsize
    return found


def tensors_of(tensors: Tensors, parts: Parts, flat: bool) -> Tensors:
    """Return each part as a tensor that may be written to."""
    whole = list(map(writable, tensors))
    if parts.single and len(parts.numels) > 1 and whole:
        return torch.split(whole[0].view(-1), list(parts.numels))
    return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in whole] if flat else whole
