"""From schedules to plans: steps that the core runs on the memory of any group of a likeness, on any tensors.

    plan = slots_plan(rank, layout, fold, blocks)
    plan = mapped_plan(rank, layout, fold, schedule)

A *slots plan* moves data through the slots of shared memory. Operations larger than a slot go through it in
blocks: every part of the inputs and outputs is cut into blocks of equal length, and blocks that are alike are
one loop. A *mapped plan* reads the tensors of other ranks in place. At its first fence the ranks find out
whether all tensors are mapped; if not, all of them run their slots plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Fold, Schedule, Span, Step
from dist2.backends.socket.host import CheckSizes, FindMemory, FoldByTorch, GivenUp
from dist2.backends.socket.layout import Layout, Parts
from dist2.backends.socket.reduction import Folding
from dist2.backends.socket.transport.boards.control_words import ALL, NOBODY
from dist2.backends.socket.transport.boards.pieces import HALVES, kind_for
from dist2.operation.engine import Plan

TENSOR, SLOT, MAPPED = range(3)
"""Bases of places: a tensor of the call, by number; a slot, by rank; memory that was taken, by number."""
THROUGH, PAST, FILL = range(3)
"""Ways of a copy: through the caches; past them; into a slot, past them if the readers' caches are far."""

LEAST_PAST = 3 << 20
"""Total bytes of a call's tensors from which on results of moves are stored past the caches."""

ONE_THREAD = 1 << 15
"""Elements up to which torch folds on one thread, as the core does."""

Counts = tuple[tuple[int, ...], tuple[int, ...]]
"""Elements of each input and output part in a block."""


Place = tuple[int, int, int]
"""Where a step reads or writes: a base, which one of it, and an offset in bytes."""


@attrs.frozen
class Blocks:
    """The blocks of a slots plan.

    Attributes:
        factory: Returns this rank's schedule for a block whose parts have these counts.
        numel: Elements of a part in a block.
        streams: Not all ranks wait for all: blocks go through pieces of the slots, and not through halves.
        sizes: Note of the sizes of an exchange (module `sizes`): other ranks may have others, and more blocks
            than this one, which is found out at the first one. None for other operations.
    """

    factory: Callable[[tuple[int, ...], tuple[int, ...]], Schedule]
    numel: int
    streams: bool = False
    sizes: int | None = None


def slots_plan(
    rank: int, layout: Layout, fold: Folding | None, blocks: Blocks, in_place: bool = False
) -> Plan:
    """Return a plan that moves data through slots.

    Args:
        rank: The group rank.
        layout: How the tensors are cut into parts.
        fold: For reductions.
        blocks: The schedules, block by block.
        in_place: The inputs are the outputs.
    """
    assert not (blocks.streams and blocks.sizes is not None)  # notes are for fences of all
    count = max(1, -(-max((*layout.inputs.numels, *layout.outputs.numels), default=0) // blocks.numel))
    lowering = _Lowering(rank, layout, fold, in_place)
    plan, number = lowering.plan, None if blocks.sizes is None else count | blocks.sizes
    plan.gathers = not blocks.streams
    stride = blocks.numel * layout.dtype.itemsize
    for index, counts, turns in _alike(layout, blocks, count):
        if turns > 1:
            plan.loop(turns, stride)
        schedule = blocks.factory(*counts)
        if schedule.slot:
            plan.claim(kind_for(schedule.slot * layout.dtype.itemsize) if blocks.streams else HALVES)
        lowering.add(schedule.steps, counts, index * stride, number if index == 0 else None)
        if turns > 1:
            plan.end()
    return plan.seal()


def mapped_plan(
    rank: int,
    layout: Layout,
    fold: Folding | None,
    schedule: Schedule,
    in_place: bool = False,
    sizes: int | None = None,
) -> Plan:
    """Return a plan that reads other ranks' tensors where they are mapped.

    Args:
        rank: The group rank.
        layout: How the tensors are cut into parts.
        fold: For reductions.
        schedule: Of a family whose ranks expose memory between the first fence and the last.
        in_place: The inputs are the outputs.
        sizes: For an exchange, whose ranks may differ in whether they run this plan: the number that those
            publish that do.
    """
    lowering = _Lowering(rank, layout, fold, in_place, schedule)
    plan, steps = lowering.plan, schedule.steps
    first = next(at for at, step in enumerate(steps) if isinstance(step, Fence))
    before, after = steps[:first], steps[first + 1 :]
    if not any(isinstance(step, Fold) for step in after):  # copies are in vain if slots are used
        before, after = (), (*after[:-1], *before, after[-1])
    counts = layout.inputs.numels, layout.outputs.numels
    exposed = lowering.exposed
    plan.gathers = True
    if sizes is not None:
        plan.expect_shared(exposed)
        plan.note(sizes)
    lowering.add(before, counts)
    plan.offer(exposed)
    plan.fence(ALL, checked=GivenUp())
    if sizes is not None:
        plan.noted(sizes, CheckSizes(sizes))
    plan.take(lowering.wanted, FindMemory())
    lowering.add(after, counts)
    return plan.seal()


def _alike(layout: Layout, blocks: Blocks, count: int) -> Iterator[tuple[int, Counts, int]]:
    """Yield the first block of each row of blocks that are alike: its number, its counts, and how many."""

    def counts_of(index: int) -> Counts:
        return layout.inputs.block(index, blocks.numel), layout.outputs.block(index, blocks.numel)

    index = 0
    while index < count:
        counts, turns = counts_of(index), 1
        if index or blocks.sizes is None:
            while index + turns < count and counts_of(index + turns) == counts:
                turns += 1
        yield index, counts, turns
        index += turns


class _Lowering:
    """Adds the steps of schedules to a plan.

    Attributes:
        plan: The plan.
        wanted: Rank and part of each place in memory that others expose.
        exposed: The parts that this rank exposes.

    Args:
        rank: The group rank.
        layout: How the tensors are cut into parts.
        fold: For reductions.
        in_place: The inputs are the outputs.
        mapped: The schedule of a mapped plan.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        fold: Folding | None,
        in_place: bool,
        mapped: Schedule | None = None,
    ) -> None:
        itemsize = self._itemsize = layout.dtype.itemsize
        self.plan = Plan(rank, layout.inputs.sizes(itemsize), layout.outputs.sizes(itemsize))
        self._parts = {Buffer.INPUT: layout.inputs, Buffer.OUTPUT: layout.outputs}
        self._firsts = {Buffer.INPUT: 0, Buffer.OUTPUT: layout.inputs.tensors}
        self._dtype, self._fold, self._in_place = layout.dtype, fold, in_place
        total = itemsize * sum((*layout.inputs.numels, *layout.outputs.numels))
        self._out = PAST if mapped is None and fold is None and total >= LEAST_PAST else THROUGH
        self._checked = None if mapped is None else GivenUp()
        self._counts: Counts = ((), ())
        self._shift = 0
        steps = () if mapped is None else mapped.steps
        spans = [span for step in steps for span in _spans(step) if span.buffer is Buffer.LENT]
        self.wanted = sorted({(span.owner, span.part) for span in spans})
        lent = None if mapped is None else mapped.lends
        parts = () if lent is None else range(len(self._parts[lent].numels))
        self.exposed = [self._part(lent, part) for part in parts if lent is not None]

    def add(self, steps: Sequence[Step], counts: Counts, shift: int = 0, noted: int | None = None) -> None:
        """Add the steps of a schedule.

        Args:
            steps: The steps.
            counts: Elements of each input and output part in the block.
            shift: Bytes from the beginning of a part to the block.
            noted: Number that is published with the fence, and compared behind it.
        """
        self._counts, self._shift = counts, shift
        own: tuple[Place, Place, int] | None = None
        for step, behind in zip(steps, [*steps[1:], None], strict=False):
            if isinstance(step, Fence):
                self._fence(step, own, noted)
                own = None
            elif isinstance(step, Copy):
                stretches = self._stretches(step)
                if stretches and isinstance(behind, Fence) and self._only_own(step):
                    own = stretches.pop()
                for dst, src, nbytes in stretches:
                    self.plan.copy(dst, src, nbytes, FILL if dst[0] == SLOT else self._out)
            elif isinstance(step, Fold):
                self._add_fold(step)
            else:
                raise TypeError(f"a plan inside a host has no {type(step).__name__}")

    def _only_own(self, step: Copy) -> bool:
        """Whether a copy is of memory that other ranks never access: it may be made while they come."""
        lends_output = bool(self.exposed) and self.exposed[0][1] >= self._firsts[Buffer.OUTPUT]
        return step.is_own and not lends_output

    def _fence(self, step: Fence, own: tuple[Place, Place, int] | None, noted: int | None) -> None:
        assert step.awaited is None or len(step.awaited) < 2
        whom = ALL if step.awaited is None else step.awaited[0] if step.awaited else NOBODY
        if noted is not None:
            self.plan.note(noted)
        self.plan.fence(whom, own, self._checked)
        if noted is not None:
            self.plan.noted(noted, CheckSizes(noted))

    def _stretches(self, step: Copy) -> list[tuple[Place, Place, int]]:
        """Return the copies of a step, each within one part on both sides; none to where the data are."""
        if self._in_place and step.is_own:
            assert step.dst.start == step.src.start  # or the schedule would overwrite its own input
            return []
        cuts = {0, step.dst.numel} | self._cuts(step.dst) | self._cuts(step.src)
        return [
            (
                self._place(step.dst, start),
                self._place(step.src, start),
                (stop - start) * self._itemsize,
            )
            for start, stop in itertools.pairwise(sorted(cuts))
        ]

    def _cuts(self, span: Span) -> set[int]:
        """Return where part boundaries cut a span, counted from its start."""
        if span.buffer not in self._parts:
            return set()
        cuts, bound = set(), 0
        for count in self._counts[span.buffer is Buffer.OUTPUT]:
            bound += count
            if span.start < bound < span.stop:
                cuts.add(bound - span.start)
        return cuts

    def _place(self, span: Span, start: int = 0) -> Place:
        """Return the place of an element of a span."""
        at = span.start + start
        if span.buffer is Buffer.SLOT:
            return (SLOT, span.owner, at * self._itemsize)
        if span.buffer is Buffer.LENT:
            return (MAPPED, self.wanted.index((span.owner, span.part)), at * self._itemsize)
        before = 0
        for part, count in enumerate(self._counts[span.buffer is Buffer.OUTPUT]):
            if at < before + count:
                _, which, start = self._part(span.buffer, part)
                return (TENSOR, which, start + self._shift + (at - before) * self._itemsize)
            before += count
        raise IndexError(f"{span} lies outside of the parts {self._counts}")

    def _part(self, buffer: Buffer, part: int) -> Place:
        """Return where a part begins."""
        parts: Parts = self._parts[buffer]
        if parts.single:
            return (TENSOR, self._firsts[buffer], sum(parts.numels[:part]) * self._itemsize)
        return (TENSOR, self._firsts[buffer] + part, 0)

    def _add_fold(self, step: Fold) -> None:
        assert self._fold is not None  # only reductions have folds, and theirs is given
        if step.dst.numel:
            places = [self._place(span) for span in (step.dst, *step.srcs)]
            add_fold(self.plan, self._fold, self._dtype, places, step.dst.numel)


def add_fold(plan: Plan, fold: Folding, dtype: torch.dtype, places: Sequence[Place], numel: int) -> None:
    """Add a fold to a plan: by the core, or by torch where it has several threads or only it knows the fold.

    Args:
        plan: The plan.
        fold: How to fold.
        dtype: Of the elements.
        places: The destination and the sources.
        numel: Elements of each.
    """
    dst, *srcs = places
    nbytes, by_torch = numel * dtype.itemsize, FoldByTorch(fold.function, dtype, numel)
    if fold.native is None or (numel > ONE_THREAD and torch.get_num_threads() > 1):
        plan.fold_elsewhere(dst, srcs, nbytes, by_torch)
    else:
        plan.fold(fold.native, fold.divisor, dst, srcs, nbytes, by_torch)


def _spans(step: Step) -> tuple[Span, ...]:
    if isinstance(step, Copy):
        return step.dst, step.src
    return (step.dst, *step.srcs) if isinstance(step, Fold) else ()
