"""`Compiler`: from a flat schedule to steps with offsets and lengths bound, for any board.

    bound = Compiler(turn, layout, inputs, outputs, shape, fold, in_place).compile(schedule)
    action = bound[0].action(board)

The action of each step is made for a board at first use, and takes a `Frame` with the positions of a call's
parts. With the C extension this is rare: a script uses the steps' native counterparts, whose addresses are
offsets in the members' regions. So groups of the same layout share the compiled steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Fold, Schedule, Span, Step
from dist2.backends.socket.bound_steps import (
    FIXED,
    PIECE,
    Bound,
    Folding,
    Place,
    Way,
    claiming,
    copying,
    copying_both,
    copying_own,
    fencing,
    folding,
    having_noted,
    noting,
)
from dist2.backends.socket.layout import Layout
from dist2.backends.socket.memory import copy_bytes, view_at
from dist2.backends.socket.reduction import Fold as FoldFunction
from dist2.backends.socket.sizes import compare_sizes
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import ALL, NOBODY
from dist2.backends.socket.transport.boards.pieces import kind_for
from dist2.backends.socket.transport.boards.regions import slot_offset
from dist2.operation.signature import Operation

Tensors = Sequence[torch.Tensor]


class Frame:
    """The positions of the parts of a call's tensors, for one block.

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
OnBoard = Callable[[Board], Action]
"""Makes the action of a step for a board, whose members must have met."""
BindCopy = Callable[[OnBoard, Place, Place, int, Way], Bound]
"""`copying`, or `copying_own`."""


class Compiler:
    """Compiles a schedule for one slot half, one element size, and one shape of parts.

    Args:
        turn: Which slot half; None: a piece, which each run claims.
        layout: How the tensors are cut into parts.
        inputs: Elements of each input part in this block.
        outputs: Elements of each output part in this block.
        shape: Shape of the tensor that folds write, where a part is a whole tensor; None: parts are flat.
        fold: Combines tensors into one, and completes the result.
        in_place: The inputs are the outputs.
        noted: Number to publish with the fence; None: none.
        into: How slots are filled: `Way.FILL`; or, with a block of data longer than the caches, `Way.IN` or
            `Way.AWAY`.
    """

    def __init__(
        self,
        turn: int | None,
        layout: Layout,
        inputs: Sequence[int],
        outputs: Sequence[int],
        shape: tuple[int, ...] | None,
        fold: Folding | None,
        in_place: bool,
        noted: int | None = None,
        into: Way = Way.FILL,
    ) -> None:
        self._turn = turn
        self._noted = noted
        self._into = into
        self._sweeps = into is not Way.FILL
        self._in_place = in_place
        self._dtype = layout.dtype
        self._layout = {Buffer.INPUT: layout.inputs, Buffer.OUTPUT: layout.outputs}
        self._counts = {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs}
        self._shape = shape
        self._fold = fold

    def compile(self, schedule: Schedule) -> tuple[Bound, ...]:
        """Return the schedule's steps, empty ones left out; their actions are `OnBoard`."""
        bound: list[Bound] = []
        if self._turn is None:
            bound.append(self._claim(schedule.slot * self._dtype.itemsize))
        own: list[Bound] = []
        last: Step | None = None
        for step, behind in zip(schedule.steps, [*schedule.steps[1:], None], strict=True):
            if isinstance(step, Fence):
                bound += self._fence(step, own)
                own = []
            elif isinstance(step, Copy):
                if isinstance(last, Copy) and self._reads_again(last, step):
                    bound[-1] = self._both(last, step)
                elif step.is_own and isinstance(behind, Fence):
                    own = self._copies(step, copying_own)
                else:
                    bound += self._copies(step)
            elif isinstance(step, Fold):
                if step.dst.numel:
                    bound.append(self._fold_step(step))
            else:
                raise TypeError(f"a flat schedule has no {type(step).__name__}")
            last = step
        return tuple(bound)

    @staticmethod
    def _claim(nbytes: int) -> Bound:
        kind = kind_for(nbytes)

        def on(board: Board) -> Action:
            return lambda frame: board.claim(frame.operation, kind)

        return claiming(on, kind)

    def _fence(self, step: Fence, own: Sequence[Bound]) -> list[Bound]:
        """Return a fence, at which something is copied that is only the caller's."""
        noted, whom = self._noted, whom_of(step)

        def on(board: Board) -> Action:
            return lambda frame: board.fence(frame.operation, whom)

        if noted is None:
            return [*own, fencing(on, whom=whom)]
        # The program that runs the steps reads the others' other numbers itself.
        return [
            noting(partial(_note, noted), noted),
            *own,
            fencing(on, whom=whom),
            having_noted(partial(_compare, noted), noted),
        ]

    def _copies(self, step: Copy, last: BindCopy = copying) -> list[Bound]:
        """Return a copy for each stretch that lies within one part on both sides.

        Args:
            step: The copy.
            last: Binds the last one.
        """
        if self._in_place and step.is_own:
            assert step.dst.start == step.src.start  # or the schedule would overwrite its own input
            return []
        cuts = {0, step.dst.numel} | self._cuts(step.dst) | self._cuts(step.src)
        stretches = list(itertools.pairwise(sorted(cuts)))
        way = self._way(step)
        return [
            self._copy(
                _stretch(step.dst, start, stop),
                _stretch(step.src, start, stop),
                way,
                copying if (start, stop) != stretches[-1] else last,
            )
            for start, stop in stretches
        ]

    def _way(self, step: Copy) -> Way:
        """Return how a script copies."""
        if step.dst.buffer is Buffer.SLOT:
            return self._into
        if not self._sweeps:
            return Way.FORWARDS
        return Way.OUT if step.src.buffer is Buffer.SLOT else Way.PAST

    def _reads_again(self, into: Copy, own: Copy) -> bool:
        """Whether two copies read the same memory, one into a slot and one for the caller."""
        if not self._sweeps or self._in_place or into.dst.buffer is not Buffer.SLOT or not own.is_own:
            return False
        return into.src == own.src and not self._cuts(own.src) | self._cuts(own.dst)

    def _both(self, into: Copy, own: Copy) -> Bound:
        nbytes = own.dst.numel * self._dtype.itemsize

        def on(board: Board) -> Action:
            give, keep = [self._moving(each.dst, each.src, nbytes, board) for each in (into, own)]

            def both(frame: Frame) -> None:
                give(frame)
                keep(frame)

            return both

        slot, passed, src = self._native(into.dst), self._native(own.dst), self._native(own.src)
        return copying_both(on, slot, passed, src, nbytes, self._into)

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

    def _copy(self, dst: Span, src: Span, way: Way, bind: BindCopy) -> Bound:
        nbytes = dst.numel * self._dtype.itemsize
        make = partial(self._moving, dst, src, nbytes)
        return bind(make, self._native(dst), self._native(src), nbytes, way)

    def _moving(self, dst: Span, src: Span, nbytes: int, board: Board) -> Action:
        to, start = self._finder(dst, board), self._finder(src, board)
        return lambda frame: copy_bytes(to(frame), start(frame), nbytes)

    def _finder(self, span: Span, board: Board) -> Callable[[Frame], int]:
        """Return a callable that finds the address of a span in a frame."""
        part, start = self._address(span, board)
        if span.buffer is Buffer.INPUT:
            return lambda frame: frame.inputs[part] + start
        if span.buffer is Buffer.OUTPUT:
            return lambda frame: frame.outputs[part] + start
        if self._turn is not None:
            return lambda frame: start
        arrivals = board.arrivals
        return lambda frame: arrivals.slot + start

    def _native(self, span: Span) -> Place:
        """Return a span as a script wants it: in a whole tensor rather than in a part."""
        part, start = self._place(span)
        if span.buffer is Buffer.SLOT:
            return FIXED if self._turn is not None else PIECE, start, span.owner
        parts, tensor = self._layout[span.buffer], part
        if parts.single:
            tensor, start = 0, start + sum(parts.numels[:part]) * self._dtype.itemsize
        return tensor if span.buffer is Buffer.INPUT else self._layout[Buffer.INPUT].tensors + tensor, start

    def _address(self, span: Span, board: Board) -> tuple[int, int]:
        """Return the part a span lies in and its byte offset there; for slots, -1 and the address."""
        part, start = self._place(span)
        if span.buffer is Buffer.SLOT:
            return -1, board.regions.page_address(span.owner) + start
        return part, start

    def _place(self, span: Span) -> tuple[int, int]:
        """Return the part a span lies in and its byte offset there; for slots, -1 and that in a region.

        In a piece that is where it would be if the piece began where the region does.
        """
        itemsize = self._dtype.itemsize
        if span.buffer is Buffer.SLOT:
            slot = 0 if self._turn is None else slot_offset(self._turn)
            return -1, slot + span.start * itemsize
        before = 0
        for part, count in enumerate(self._counts[span.buffer]):
            if span.start < before + count:
                return part, (span.start - before) * itemsize
            before += count
        raise IndexError(f"{span} lies outside of the parts {self._counts[span.buffer]}")

    def _fold_step(self, step: Fold) -> Bound:
        numel = step.dst.numel
        assert self._fold is not None  # only reductions have folds, and theirs is bound
        return folding(
            partial(self._folding, step, self._fold.function),
            self._fold,
            self._native(step.dst),
            [self._native(span) for span in step.srcs],
            numel * self._dtype.itemsize,
            numel,
        )

    def _folding(self, step: Fold, fold: FoldFunction, board: Board) -> Action:
        target = self._tensor(step.dst, board)
        if self._turn is not None and all(span.buffer is Buffer.SLOT for span in step.srcs):
            fixed = [self._view(span, board) for span in step.srcs]
            return lambda frame: fold(target(frame), fixed)
        sources = [self._tensor(span, board) for span in step.srcs]
        return lambda frame: fold(target(frame), [source(frame) for source in sources])

    def _tensor(self, span: Span, board: Board) -> Callable[[Frame], torch.Tensor]:
        """Return a callable that finds a span's tensor in a frame."""
        if span.buffer is Buffer.SLOT and self._turn is None:
            return self._view_in_piece(span, board)
        if span.buffer is Buffer.SLOT:
            view = self._view(span, board)
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

    def _view(self, span: Span, board: Board) -> torch.Tensor:
        _, start = self._place(span)
        buffer = board.regions.part(span.owner, start, span.numel * self._dtype.itemsize)
        return view_at(buffer, self._dtype, (span.numel,) if self._shape is None else self._shape)

    def _view_in_piece(self, span: Span, board: Board) -> Callable[[Frame], torch.Tensor]:
        """Return a callable that finds a span's tensor in the piece that was claimed last."""
        itemsize, dtype = self._dtype.itemsize, self._dtype
        shape = (span.numel,) if self._shape is None else self._shape
        views: dict[int, torch.Tensor] = {}  # by where the piece begins

        def find(frame: Frame) -> torch.Tensor:
            at = board.arrivals.slot
            view = views.get(at)
            if view is None:
                buffer = board.regions.part(span.owner, at + span.start * itemsize, span.numel * itemsize)
                view = views[at] = view_at(buffer, dtype, shape)
            return view

        return find


def _note(number: int, board: Board) -> Action:
    """Return a callable that publishes a number to the others."""
    return lambda frame: board.note(frame.operation, number)


def _compare(number: int, board: Board) -> Action:
    """Return a callable that compares the sizes of the ranks, which have published different numbers."""
    return lambda frame: compare_sizes(board, frame.operation, number)


def whom_of(fence: Fence) -> int:
    """Return the ranks to wait for at a fence, in the encoding of boards."""
    if fence.awaited is None:
        return ALL
    return fence.awaited[0] if fence.awaited else NOBODY


def _stretch(span: Span, start: int, stop: int) -> Span:
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
