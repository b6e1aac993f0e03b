"""Runs flat schedules: those whose steps are copies, folds and fences on shared memory.

A recipe (`flat_recipe`) is what to do on any board. Running it on one is doing its steps in order, in one
call of a `script.Script` where there is one; block after block where an operation is larger than a slot. On
pieces of slots, one script does all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dist2.backends.socket.compiler import Action, Frame, Layout, Parts
from dist2.backends.socket.flat_recipe import Counts, FlatRecipe
from dist2.backends.socket.script import Bound, Script, native_program, script_of
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport.boards.board import Board
from dist2.operation import Operation

LENDING = 1 << 32
"""What a rank notes instead of its number of blocks where it would rather lend its tensors: nothing is in its
slot, and those that went ahead start over."""

MAX_JOINED = 64
"""Blocks that one script does; with more of them what Python does between two scripts counts for little."""

Tensors = Sequence[torch.Tensor]


class _Block:
    """A block's steps on one slot half of a board, or on a piece.

    Args:
        board: The group's shared memory; its members must have met.
        bound: The steps.
        layout: How the tensors are cut into parts.

    Attributes:
        script: The steps in C, once they were prepared and where they can be.
    """

    def __init__(self, board: Board, bound: tuple[Bound, ...], layout: Layout) -> None:
        self.script: Script | None = None
        self._board = board
        self._bound = bound
        self._layout = layout
        self._is_ready = False
        self._made: list[Action] | None = None

    @property
    def _actions(self) -> list[Action]:
        """What does each step: made for the board when Python has to do one of them."""
        if self._made is None:
            self._made = [step.action(self._board) for step in self._bound]
        return self._made

    def prepare(self) -> None:
        """Make the script, if there can be one; it is not before its half has its turn."""
        if not self._is_ready:
            layout = self._layout
            self.script = script_of(self._board, self._bound, layout.inputs.tensors, layout.outputs.tensors)
            self._is_ready = True

    def run(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, shift: int, frame: Callable[[], Frame]
    ) -> bool:
        """Do all steps; the frame is only made if Python does one of them.

        Returns:
            Whether it did none: then all noted the same as well.
        """
        self.prepare()
        if self.script is None:
            made = frame()
            for action in self._actions:
                action(made)
            return False
        at = self.script.run(operation, inputs, outputs, shift, 0)
        if at == len(self._bound):
            return True
        self.go_on(operation, inputs, outputs, shift, frame, at)
        return False

    def go_on(
        self,
        operation: Operation,
        inputs: Tensors,
        outputs: Tensors,
        shift: int,
        frame: Callable[[], Frame],
        at: int,
    ) -> None:
        """Do the step that the script stopped at, and those behind it."""
        script, actions = self.script, self._actions
        assert script is not None  # it stopped
        made = frame()
        while at < len(actions):
            actions[at](made)
            at = script.run(operation, inputs, outputs, shift, at + 1)


class _Joined:
    """All blocks of a call on pieces of a board, one after the other, in one script.

    Args:
        board: The group's shared memory; its members must have met.
        steps: What to do, each step with the number of its block.
        script: The same in C.
    """

    def __init__(self, board: Board, steps: tuple[tuple[int, Bound], ...], script: Script) -> None:
        self.script = script
        self._board = board
        self._steps = steps
        self._made: dict[int, Action] = {}

    def go_on(
        self,
        operation: Operation,
        inputs: Tensors,
        outputs: Tensors,
        frame: Callable[[int], Frame],
        at: int,
    ) -> None:
        """Do the step that the script stopped at, if it did, and those behind it."""
        while at < len(self._steps):
            index, step = self._steps[at]
            action = self._made.get(at)
            if action is None:
                action = self._made[at] = step.action(self._board)
            action(frame(index))
            at = self.script.run(operation, inputs, outputs, 0, at + 1)


class FlatProgram:
    """A recipe on the board of a group.

    Args:
        board: The group's shared memory.
        recipe: What to do.
    """

    def __init__(self, board: Board, recipe: FlatRecipe) -> None:
        self._board = board
        self._recipe = recipe
        self._layout = recipe.layout
        self._itemsize = recipe.layout.dtype.itemsize
        self._ready: dict[Counts, tuple[_Block, _Block]] = {}
        self._flat = False
        self._one: tuple[_Block, _Block] | None = None
        self._joined: _Joined | None = None
        # The halves have turns; on pieces, which each block claims, both scripts are one.
        self._native = native_program(board, self, self._go_on, by_parity=recipe.streams)

    @property
    def program(self) -> Program:
        """What to call: this, or what does the same in C where one script does a call."""
        return self if self._native is None else self._native

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        one, blocks = self._one, self._recipe.blocks
        if one is None:
            self._board.meet(operation, fence_follows=not self._recipe.streams)
            one = self._one = self._block_of(0)
            self._join()
        if self._joined is not None:
            at = self._joined.script.run(operation, inputs, outputs, 0, 0)
            self._go_on(operation, inputs, outputs, 0, at, 0)
            return
        if blocks > 1:
            self._run_blocks(operation, inputs, outputs, 0, blocks)
            return
        turn = self._turn()
        one[turn].prepare()
        if self._native is not None:
            self._native.scripts = (one[0].script, one[1].script)
        frame = partial(self._frame, operation, inputs, outputs)
        if not one[turn].run(operation, inputs, outputs, 0, frame) and self._recipe.uneven:
            self._run_blocks(operation, inputs, outputs, *self._after_first())

    def _join(self) -> None:
        """Have C do all blocks of the next calls in one script, where it can."""
        recipe = self._recipe
        if self._native is not None and recipe.streams and 1 < recipe.blocks <= MAX_JOINED:
            steps, layout = recipe.joined(), self._layout
            bound = [step for _, step in steps]
            script = script_of(self._board, bound, layout.inputs.tensors, layout.outputs.tensors)
            if script is not None:
                self._joined = _Joined(self._board, steps, script)
                self._native.scripts = (script, script)

    def _go_on(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, turn: int, at: int, first: int
    ) -> None:
        """Do what a script has left."""
        if self._joined is not None:
            frames = partial(self._block_frame, operation, inputs, outputs)
            self._joined.go_on(operation, inputs, outputs, frames, at)
            return
        assert self._one is not None  # it has run
        frame = partial(self._frame, operation, inputs, outputs)
        self._one[turn].go_on(operation, inputs, outputs, 0, frame, at)
        if self._recipe.uneven:
            self._run_blocks(operation, inputs, outputs, *self._after_first())

    def _run_blocks(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, index: int, blocks: int
    ) -> None:
        """Do the blocks from one on; where ranks may have more than this one, the first tells."""
        while index < blocks:
            block = self._block_of(index)
            turn = self._turn()
            frame = partial(self._block_frame, operation, inputs, outputs, index)
            block[turn].run(operation, inputs, outputs, index * self._recipe.block * self._itemsize, frame)
            if self._recipe.uneven and index == 0:
                index, blocks = self._after_first()
            else:
                index += 1

    def _after_first(self) -> tuple[int, int]:
        """Return the block to do after the first one, and how many there are, by what the others noted."""
        noted, blocks = self._board.noted(), self._recipe.blocks
        return (0, blocks) if LENDING in noted else (1, max(blocks, *noted))

    def _turn(self) -> int:
        """Return which of a block's steps to run: on which slot half, or on a piece that they claim."""
        board = self._board
        if self._recipe.streams:
            return 0
        turn = board.turn
        board.turn = 1 - turn
        return turn

    def _block_of(self, index: int) -> tuple[_Block, _Block]:
        """Return a block's steps: for each slot half, or twice the same for a piece."""
        recipe = self._recipe
        counts = recipe.counts(index)
        found = self._ready.get(counts)
        if found is None:
            steps = recipe.steps(counts)
            self._flat = steps.flat
            one = _Block(self._board, steps.halves[0], self._layout)
            other = one if recipe.streams else _Block(self._board, steps.halves[1], self._layout)
            found = self._ready[counts] = (one, other)
        return found

    def _block_frame(self, operation: Operation, inputs: Tensors, outputs: Tensors, index: int) -> Frame:
        """Return where the parts of a block lie."""
        whole = self._frame(operation, inputs, outputs, flat=True)
        start, stop = index * self._recipe.block, (index + 1) * self._recipe.block
        shift = start * self._itemsize
        return Frame(
            operation,
            [address + shift for address in whole.inputs],
            [address + shift for address in whole.outputs],
            [part[start:stop] for part in whole.input_parts],
            [part[start:stop] for part in whole.output_parts],
        )

    def _frame(self, operation: Operation, inputs: Tensors, outputs: Tensors, *, flat: bool = False) -> Frame:
        flat = flat or self._flat
        folds, layout = self._recipe.folds, self._layout
        return Frame(
            operation,
            addresses(inputs, layout.inputs, self._itemsize),
            addresses(outputs, layout.outputs, self._itemsize),
            tensors_of(inputs, layout.inputs, flat) if folds else (),
            tensors_of(outputs, layout.outputs, flat) if folds else (),
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
    whole = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    if parts.single and len(parts.numels) > 1 and whole:
        return torch.split(whole[0].view(-1), list(parts.numels))
    return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in whole] if flat else whole
