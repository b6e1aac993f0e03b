"""`FlatRecipe`: a flat schedule compiled for one signature, for all groups of the same layout.

The schedule becomes a tuple of steps with offsets and lengths bound. Operations larger than a slot run in
blocks: every part of the inputs and outputs is cut into blocks of equal length, and each length of block has
a schedule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.bound_steps import Bound, Folding, Way, beside, further, is_copy
from dist2.backends.socket.compiler import Compiler, folds_need_flat
from dist2.backends.socket.layout import Layout
from dist2.backends.socket.script import Native, native_steps

LEAST_SWEPT = 3 << 20
"""Total bytes of a call's tensors from which on the caches hold few of them.

Only operations that move data copy in blocks for that: reductions of slots gain nothing, or take longer."""

Counts = tuple[tuple[int, ...], tuple[int, ...]]
"""Elements of each input and output part in a block."""
ScheduleFactory = Callable[[tuple[int, ...], tuple[int, ...]], Schedule]
"""Returns this rank's schedule for a block whose inputs and outputs have these counts."""


@attrs.frozen(eq=False)
class BoundSteps:
    """Steps on one slot half, or on a piece.

    Attributes:
        bound: The steps.
        native: The same for a script in C; None where Python does each of them.
    """

    bound: tuple[Bound, ...]
    native: Native | None

    @classmethod
    def of(cls, bound: tuple[Bound, ...]) -> BoundSteps:
        return cls(bound, native_steps(bound))


@attrs.frozen(eq=False)
class BlockSteps:
    """The steps of a block, for any board.

    Attributes:
        halves: For each slot half; or twice the same, on a piece. Their actions are `compiler.OnBoard`.
        flat: Whether parts must be one-dimensional.
    """

    halves: tuple[BoundSteps, BoundSteps]
    flat: bool


class FlatRecipe:
    """A flat algorithm compiled for one signature, on the boards of all groups of the same layout.

    Args:
        factory: The algorithm.
        layout: How the tensors are cut into parts.
        block: Elements of a part that go through the slots at a time.
        shape: Shape of the tensors, where every part is a whole tensor of one shape.
        fold: For reductions.
        sizes: Note of the sizes of an exchange (see `sizes`): other ranks may have others, and more blocks
            than this one, which is found out then. None for other operations.
        in_place: The inputs are the outputs.
        streams: Blocks go through pieces of slots, and not through the halves.
        away: Data longer than the caches goes past them into slots, as many read it.

    Attributes:
        blocks: How many there are.
    """

    def __init__(
        self,
        factory: ScheduleFactory,
        layout: Layout,
        block: int,
        shape: tuple[int, ...] | None = None,
        fold: Folding | None = None,
        sizes: int | None = None,
        in_place: bool = False,
        streams: bool = False,
        away: bool = False,
    ) -> None:
        self.layout = layout
        self.block = block
        self.folds = fold is not None
        self.uneven = sizes is not None
        self._sizes = sizes
        self.streams = streams
        numels = (*layout.inputs.numels, *layout.outputs.numels)
        self.blocks = max(1, -(-max(numels, default=0) // block))
        self._into = Way.FILL
        if fold is None and sum(numels) * layout.dtype.itemsize >= LEAST_SWEPT:
            self._into = Way.AWAY if away else Way.IN
        self._factory = factory
        self._shape = shape
        self._fold = fold
        self._in_place = in_place
        self._steps: dict[Counts, BlockSteps] = {}
        self._first: Counts | None = None
        self._joined: dict[tuple[Counts, int, int], tuple[tuple[int, Bound], ...]] = {}

    def counts(self, index: int) -> Counts:
        """Return how many elements of each input and output part are in a block."""
        if index == 0 and self._first is not None:
            return self._first
        counts = self.layout.inputs.block(index, self.block), self.layout.outputs.block(index, self.block)
        if index == 0:
            self._first = counts
        return counts

    def steps(self, counts: Counts) -> BlockSteps:
        """Return the steps of a block with so many elements of each part."""
        found = self._steps.get(counts)
        if found is None:
            schedule = self._factory(*counts)
            flat = self.blocks > 1 or self._shape is None or folds_need_flat(schedule, *counts)
            turns = (None,) if self.streams else (0, 1)
            halves = [BoundSteps.of(self._compile(schedule, counts, flat, turn)) for turn in turns]
            found = self._steps[counts] = BlockSteps((halves[0], halves[-1]), flat)
        return found

    def joined(self, first: int, count: int, turn: int = 0) -> tuple[tuple[int, Bound], ...]:
        """Return the steps of consecutive blocks, each with the number of its block.

        Args:
            first: Number of the first block. The result also serves other numbers whose blocks have the same
                counts.
            count: Number of blocks.
            turn: The slot half of the first block; the next one uses the other half. 0 for pieces.
        """
        key = self.counts(first), count, turn
        if key not in self._joined:
            size = self.block * self.layout.dtype.itemsize
            steps = [
                (index, further(step, index * size))
                for index in range(count)
                for step in self.steps(self.counts(first + index)).halves[(turn + index) % 2].bound
            ]
            self._joined[key] = tuple(_in_turn(steps))
        return self._joined[key]

    def _compile(self, schedule: Schedule, counts: Counts, flat: bool, turn: int | None) -> tuple[Bound, ...]:
        shape = None if flat else self._shape
        noted = None if self._sizes is None else self.blocks | self._sizes
        compiler = Compiler(turn, self.layout, *counts, shape, self._fold, self._in_place, noted, self._into)
        return compiler.compile(schedule)


def _in_turn(steps: Sequence[tuple[int, Bound]]) -> Iterator[tuple[int, Bound]]:
    """Yield steps of blocks, each with the number of its block: slots are emptied while others are filled.

    The copies of a block behind its fence never write the sources of the next block's copies before its own
    fence. One kind waits for another core's cache, the other for memory: alternating, they wait for both at
    once.
    """
    emptying: list[tuple[int, Bound]] = []
    for each in steps:
        if is_copy(each[1], Way.OUT):
            emptying.append(each)
            continue
        if emptying and is_copy(each[1], Way.IN, Way.AWAY):
            index, step = emptying.pop(0)
            yield index, beside(step)
        else:
            yield from emptying
            emptying = []
        yield each
    yield from emptying
