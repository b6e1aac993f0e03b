"""Runs flat schedules: those whose steps are copies, folds and fences on shared memory.

A schedule is compiled once for each signature into a tuple of steps with addresses, views and lengths bound;
running it is doing them in order, in one call of a `script.Script` where there is one. Operations larger than
a slot run in blocks: every part of the inputs and outputs is cut into blocks of equal length, and block after
block goes through a schedule of its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.compiler import Compiler, Frame, Layout, Parts, folds_need_flat
from dist2.backends.socket.script import Bound, Folding, Script, native_program, script_of
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport.board import Board
from dist2.operation import Operation

LENDING = 1 << 32
"""What a rank notes instead of its number of blocks where it would rather lend its tensors: nothing is in its
slot, and those that went ahead start over."""

Tensors = Sequence[torch.Tensor]

ScheduleFactory = Callable[[tuple[int, ...], tuple[int, ...]], Schedule]
"""From the elements of each input and output part in a block to this rank's schedule for it."""


@attrs.frozen
class _Block:
    """A block's steps on one slot half, or on a piece, made ready.

    Attributes:
        bound: The steps.
        script: The same in C, where there is one.
    """

    bound: tuple[Bound, ...]
    script: Script | None

    def run(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, shift: int, frame: Callable[[], Frame]
    ) -> bool:
        """Do all steps; the frame is only made if Python does one of them.

        Returns:
            Whether it did none: then all noted the same as well.
        """
        script, bound = self.script, self.bound
        if script is None:
            made = frame()
            for step in bound:
                step.action(made)
            return False
        at = script.run(operation, inputs, outputs, shift, 0)
        if at == len(bound):
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
        script, bound = self.script, self.bound
        assert script is not None  # it stopped
        made = frame()
        while at < len(bound):
            bound[at].action(made)
            at = script.run(operation, inputs, outputs, shift, at + 1)


class FlatProgram:
    """A flat algorithm made ready for one signature.

    Args:
        board: The group's shared memory.
        factory: The algorithm.
        layout: How the tensors are cut into parts.
        block: Elements of a part that go through the slots at a time.
        shape: Shape of the tensors, where every part is a whole tensor of one shape.
        fold: For reductions.
        uneven: Whether other ranks may have more blocks than this one, which is then found out.
        in_place: The inputs are the outputs.
        streams: Blocks go through pieces of slots, and not through the halves.
    """

    def __init__(
        self,
        board: Board,
        factory: ScheduleFactory,
        layout: Layout,
        block: int,
        shape: tuple[int, ...] | None = None,
        fold: Folding | None = None,
        uneven: bool = False,
        in_place: bool = False,
        streams: bool = False,
    ) -> None:
        self._board = board
        self._factory = factory
        self._layout = layout
        self._itemsize = layout.dtype.itemsize
        self._inputs = layout.inputs
        self._outputs = layout.outputs
        self._block = block
        self._shape = shape
        self._fold = fold
        self._uneven = uneven
        self._in_place = in_place
        longest = max((*self._inputs.numels, *self._outputs.numels), default=0)
        self._blocks = max(1, -(-longest // block))
        self._compiled: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[_Block, ...]] = {}
        self._flat = False
        self._streams = streams
        self._one: tuple[_Block, ...] | None = None
        # The halves have turns; on pieces, which each block claims, both scripts are one.
        self._native = native_program(board, self, self._go_on, by_parity=streams)

    @property
    def program(self) -> Program:
        """What to call: this, or what does the same in C where there is one block."""
        return self if self._native is None else self._native

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        one = self._one
        board = self._board
        if one is None:
            board.meet(operation)
            one = self._one = self._block_of(0)
            if self._native is not None and self._blocks == 1:
                self._native.scripts = (one[0].script, one[1].script)
        if self._blocks > 1:
            self._run_blocks(operation, inputs, outputs, 0, self._blocks)
            return
        turn = self._turn(operation)
        frame = partial(self._frame, operation, inputs, outputs)
        if not one[turn].run(operation, inputs, outputs, 0, frame) and self._uneven:
            self._run_blocks(operation, inputs, outputs, *self._after_first())

    def _go_on(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, turn: int, at: int, first: int
    ) -> None:
        """Do what a script of the one block has left."""
        assert self._one is not None  # it has run
        frame = partial(self._frame, operation, inputs, outputs)
        self._one[turn].go_on(operation, inputs, outputs, 0, frame, at)
        if self._uneven:
            self._run_blocks(operation, inputs, outputs, *self._after_first())

    def _run_blocks(
        self, operation: Operation, inputs: Tensors, outputs: Tensors, index: int, blocks: int
    ) -> None:
        """Do the blocks from one on; where ranks may have more than this one, the first tells."""
        while index < blocks:
            block = self._block_of(index)
            turn = self._turn(operation)
            frame = partial(self._block_frame, operation, inputs, outputs, index)
            block[turn].run(operation, inputs, outputs, index * self._block * self._itemsize, frame)
            if self._uneven and index == 0:
                index, blocks = self._after_first()
            else:
                index += 1

    def _after_first(self) -> tuple[int, int]:
        """Return the block to do after the first one, and how many there are, by what the others noted."""
        noted = self._board.noted()
        return (0, self._blocks) if LENDING in noted else (1, max(self._blocks, *noted))

    def _turn(self, operation: Operation) -> int:
        """Return which of a block's steps to run: on which slot half, or on a piece that they claim."""
        board = self._board
        if self._streams:
            return 0
        turn = board.turn
        board.turn = 1 - turn
        return turn

    def _block_of(self, index: int) -> tuple[_Block, ...]:
        """Return the compiled steps of a block: for each slot half, or twice the same for a piece."""
        counts = self._inputs.block(index, self._block), self._outputs.block(index, self._block)
        found = self._compiled.get(counts)
        if found is None:
            schedule = self._factory(*counts)
            self._flat = self._blocks > 1 or self._shape is None or folds_need_flat(schedule, *counts)
            turns = (None,) if self._streams else (0, 1)
            blocks = tuple([self._compile(schedule, counts, turn) for turn in turns])
            found = self._compiled[counts] = (blocks[0], blocks[-1])
        return found

    def _compile(
        self, schedule: Schedule, counts: tuple[tuple[int, ...], tuple[int, ...]], turn: int | None
    ) -> _Block:
        shape = None if self._flat else self._shape
        noted = self._blocks if self._uneven else None
        compiler = Compiler(
            self._board, turn, self._layout, *counts, shape, self._fold, self._in_place, noted
        )
        bound = compiler.compile(schedule)
        return _Block(bound, script_of(self._board, bound, self._inputs.tensors, self._outputs.tensors))

    def _block_frame(self, operation: Operation, inputs: Tensors, outputs: Tensors, index: int) -> Frame:
        """Return where the parts of a block lie."""
        whole = self._frame(operation, inputs, outputs, flat=True)
        start, stop = index * self._block, (index + 1) * self._block
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
        folding = self._fold is not None
        return Frame(
            operation,
            addresses(inputs, self._inputs, self._itemsize),
            addresses(outputs, self._outputs, self._itemsize),
            tensors_of(inputs, self._inputs, flat) if folding else (),
            tensors_of(outputs, self._outputs, flat) if folding else (),
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
