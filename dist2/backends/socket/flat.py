"""Runs flat schedules: those whose steps are copies, folds and fences on shared memory.

A schedule is compiled once for each signature into a tuple of closures with addresses, views and
lengths bound; running it is calling them in order. Operations larger than a slot run in blocks: every
part of the inputs and outputs is cut into blocks of equal length, and block after block goes through a
schedule of its own size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Fold, Schedule, Span
from dist2.backends.socket.memory import copy_bytes, view_at
from dist2.backends.socket.transport.board import Board
from dist2.operation import Operation

LENDING = 1 << 32
"""What a rank notes instead of its number of blocks where it would rather lend its tensors: nothing is in its
slot, and those that went ahead start over."""

FoldFunction = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
Tensors = Sequence[torch.Tensor]


@attrs.frozen
class Parts:
    """How a buffer of a schedule lies in tensors: part r is the data from or for rank r.

    Attributes:
        numels: Elements of each part.
        single: Whether the parts lie one after the other in a single tensor.
    """

    numels: tuple[int, ...]
    single: bool

    def block(self, index: int, numel: int) -> tuple[int, ...]:
        """Return how many elements of each part fall into a block."""
        return tuple(max(0, min(numel, part - index * numel)) for part in self.numels)


@attrs.frozen
class Layout:
    """How a call's tensors are cut into parts.

    Attributes:
        inputs: Those read.
        outputs: Those written.
        dtype: Of all of them.
    """

    inputs: Parts
    outputs: Parts
    dtype: torch.dtype


class Frame:
    """Where the parts of one block of one call lie.

    Attributes:
        operation: The call.
        inputs: Address of each input part.
        outputs: Address of each output part.
        input_parts: The input parts as tensors, for folds; flat unless the schedule has one block.
        output_parts: Likewise.
    """

    __slots__ = ("input_parts", "inputs", "operation", "output_parts", "outputs")

    def __init__(
        self,
        operation: Operation,
        inputs: Sequence[int],
        outputs: Sequence[int],
        input_parts: Tensors,
        output_parts: Tensors,
    ) -> None:
        self.operation = operation
        self.inputs = inputs
        self.outputs = outputs
        self.input_parts = input_parts
        self.output_parts = output_parts


Action = Callable[[Frame], None]


class Compiler:
    """Compiles a schedule for one slot half, one element size, and one shape of parts.

    Args:
        board: The group's shared memory; its members must have met.
        turn: Which slot half.
        dtype: Of the elements.
        inputs: Elements of each input part in this block.
        outputs: Elements of each output part in this block.
        shape: Shape of the tensor that folds write, where a part is a whole tensor; None: parts are flat.
        fold: Combines tensors into one, and completes the result.
        in_place: The inputs are the outputs.
    """

    def __init__(
        self,
        board: Board,
        turn: int,
        dtype: torch.dtype,
        inputs: Sequence[int],
        outputs: Sequence[int],
        shape: tuple[int, ...] | None,
        fold: FoldFunction | None,
        in_place: bool,
    ) -> None:
        self._board = board
        self._turn = turn
        self._in_place = in_place
        self._dtype = dtype
        self._counts = {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs}
        self._shape = shape
        self._fold = fold

    def compile(self, schedule: Schedule) -> tuple[Action, ...]:
        """Return the schedule's steps as closures, empty ones left out."""
        actions: list[Action] = []
        for step in schedule.steps:
            if isinstance(step, Fence):
                actions.append(self._fence())
            elif isinstance(step, Copy):
                actions += self._copies(step)
            elif isinstance(step, Fold):
                if step.dst.numel:
                    actions.append(self._folding(step))
            else:
                raise TypeError(f"a flat schedule has no {type(step).__name__}")
        return tuple(actions)

    def _fence(self) -> Action:
        fence = self._board.fence
        return lambda frame: fence(frame.operation)

    def _copies(self, step: Copy) -> list[Action]:
        """Return a copy for each stretch that lies within one part on both sides."""
        if self._in_place and (step.dst.buffer, step.src.buffer) == (Buffer.OUTPUT, Buffer.INPUT):
            assert step.dst.start == step.src.start  # or the schedule would overwrite its own input
            return []
        cuts = {0, step.dst.numel} | self._cuts(step.dst) | self._cuts(step.src)
        bounds = sorted(cuts)
        return [
            self._copy(_piece(step.dst, start, stop), _piece(step.src, start, stop))
            for start, stop in itertools.pairwise(bounds)
        ]

    def _cuts(self, span: Span) -> set[int]:
        """Return where part boundaries cut a span, counted from its start."""
        if span.buffer is Buffer.SLOT:
            return set()
        cuts, bound = set(), 0
        for count in self._counts[span.buffer]:
            bound += count
            if span.start < bound < span.stop:
                cuts.add(bound - span.start)
        return cuts

    def _copy(self, dst: Span, src: Span) -> Action:
        nbytes = dst.numel * self._dtype.itemsize
        to_part, to = self._place(dst)
        from_part, start = self._place(src)
        read_input = src.buffer is Buffer.INPUT
        if dst.buffer is Buffer.SLOT and src.buffer is Buffer.SLOT:
            return lambda frame: copy_bytes(to, start, nbytes)
        if dst.buffer is Buffer.SLOT:
            if read_input:
                return lambda frame: copy_bytes(to, frame.inputs[from_part] + start, nbytes)
            return lambda frame: copy_bytes(to, frame.outputs[from_part] + start, nbytes)
        if src.buffer is Buffer.SLOT:
            return lambda frame: copy_bytes(frame.outputs[to_part] + to, start, nbytes)
        if read_input:
            return lambda frame: copy_bytes(
                frame.outputs[to_part] + to, frame.inputs[from_part] + start, nbytes
            )
        return lambda frame: copy_bytes(frame.outputs[to_part] + to, frame.outputs[from_part] + start, nbytes)

    def _place(self, span: Span) -> tuple[int, int]:
        """Return the part a span lies in and its byte offset there; for slots, -1 and the address."""
        itemsize = self._dtype.itemsize
        if span.buffer is Buffer.SLOT:
            return -1, self._board.slot_address(span.owner, self._turn) + span.start * itemsize
        before = 0
        for part, count in enumerate(self._counts[span.buffer]):
            if span.start < before + count:
                return part, (span.start - before) * itemsize
            before += count
        raise IndexError(f"{span} lies outside of the parts {self._counts[span.buffer]}")

    def _folding(self, step: Fold) -> Action:
        fold = self._fold
        assert fold is not None  # only reductions have folds, and theirs is bound
        target = self._tensor(step.dst)
        if all(span.buffer is Buffer.SLOT for span in step.srcs):
            fixed = [self._view(span) for span in step.srcs]
            return lambda frame: fold(target(frame), fixed)
        sources = [self._tensor(span) for span in step.srcs]
        return lambda frame: fold(target(frame), [source(frame) for source in sources])

    def _tensor(self, span: Span) -> Callable[[Frame], torch.Tensor]:
        """Return what finds a span's tensor in a frame."""
        if span.buffer is Buffer.SLOT:
            view = self._view(span)
            return lambda frame: view
        part, offset = self._place(span)
        whole = span.numel == self._counts[span.buffer][part]
        start = offset // self._dtype.itemsize
        stop = start + span.numel
        if span.buffer is Buffer.INPUT:
            if whole:
                return lambda frame: frame.input_parts[part]
            return lambda frame: frame.input_parts[part][start:stop]
        if whole:
            return lambda frame: frame.output_parts[part]
        return lambda frame: frame.output_parts[part][start:stop]

    def _view(self, span: Span) -> torch.Tensor:
        buffer = self._board.slot_bytes(span.owner, self._turn)[span.start * self._dtype.itemsize :]
        return view_at(buffer, self._dtype, (span.numel,) if self._shape is None else self._shape)


def _piece(span: Span, start: int, stop: int) -> Span:
    return attrs.evolve(span, start=span.start + start, stop=span.start + stop)


def folds_need_flat(schedule: Schedule, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
    """Whether some fold takes less than a whole part, so that parts must be one-dimensional."""
    wholes = {Buffer.INPUT: set(_bounds(inputs)), Buffer.OUTPUT: set(_bounds(outputs))}
    spans = [span for step in schedule.steps if isinstance(step, Fold) for span in (step.dst, *step.srcs)]
    return any((span.start, span.stop) not in wholes[span.buffer] for span in spans if span.buffer in wholes)


def _bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    bounds, start = [], 0
    for count in counts:
        bounds.append((start, start + count))
        start += count
    return bounds


ScheduleFactory = Callable[[tuple[int, ...], tuple[int, ...]], Schedule]
"""From the elements of each input and output part in a block to this rank's schedule for it."""


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
    """

    def __init__(
        self,
        board: Board,
        factory: ScheduleFactory,
        layout: Layout,
        block: int,
        shape: tuple[int, ...] | None = None,
        fold: FoldFunction | None = None,
        uneven: bool = False,
        in_place: bool = False,
    ) -> None:
        self._board = board
        self._factory = factory
        self._dtype = layout.dtype
        self._inputs = layout.inputs
        self._outputs = layout.outputs
        self._block = block
        self._shape = shape
        self._fold = fold
        self._uneven = uneven
        self._in_place = in_place
        longest = max((*self._inputs.numels, *self._outputs.numels), default=0)
        self._blocks = max(1, -(-longest // block))
        self._compiled: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[Action, ...], ...]] = {}
        self._flat = False
        self._one: tuple[tuple[Action, ...], ...] | None = None

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        one = self._one
        board = self._board
        if one is None:
            board.meet(operation)
            if self._blocks > 1 or self._uneven:
                self._run_blocks(operation, inputs, outputs)
                return
            one = self._one = self._actions(0)
        frame = self._frame(operation, inputs, outputs)
        turn = board.turn
        board.turn = 1 - turn
        for action in one[turn]:
            action(frame)

    def _run_blocks(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        board, itemsize = self._board, self._dtype.itemsize
        whole = self._frame(operation, inputs, outputs, flat=True)
        index, blocks = 0, self._blocks
        while index < blocks:
            if self._uneven:
                board.note(self._blocks)
            start, stop = index * self._block, (index + 1) * self._block
            actions = self._actions(index)
            frame = Frame(
                operation,
                [address + start * itemsize for address in whole.inputs],
                [address + start * itemsize for address in whole.outputs],
                [part[start:stop] for part in whole.input_parts],
                [part[start:stop] for part in whole.output_parts],
            )
            turn = board.turn
            board.turn = 1 - turn
            for action in actions[turn]:
                action(frame)
            if self._uneven and index == 0:
                noted = board.noted()
                if LENDING in noted:
                    continue
                blocks = max(blocks, *noted)
            index += 1

    def _actions(self, index: int) -> tuple[tuple[Action, ...], ...]:
        """Return the compiled steps of a block, for each slot half."""
        counts = self._inputs.block(index, self._block), self._outputs.block(index, self._block)
        found = self._compiled.get(counts)
        if found is None:
            schedule = self._factory(*counts)
            self._flat = self._blocks > 1 or self._shape is None or folds_need_flat(schedule, *counts)
            shape = None if self._flat else self._shape
            found = tuple(
                Compiler(self._board, turn, self._dtype, *counts, shape, self._fold, self._in_place).compile(
                    schedule
                )
                for turn in (0, 1)
            )
            self._compiled[counts] = found
        return found

    def _frame(self, operation: Operation, inputs: Tensors, outputs: Tensors, *, flat: bool = False) -> Frame:
        flat = flat or self._flat
        folding = self._fold is not None
        return Frame(
            operation,
            addresses(inputs, self._inputs, self._dtype.itemsize),
            addresses(outputs, self._outputs, self._dtype.itemsize),
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
