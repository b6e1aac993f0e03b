# cython: annotation_typing=False
"""From schedules to plans: steps that the core runs on the memory of any group of a likeness, on any tensors.

    plan = slots_plan(rank, layout, folds, blocks)
    plan = mapped_plan(rank, layout, folds, schedule)
    plan = message_plan(rank, layout, folds, schedule, shift=0)

The elements of a schedule number the concatenation of all parts of the inputs, or of the outputs, so a span
may lie in several parts. Steps are cut at their ends. A message that lies across one goes through a piece of
scratch: the other side need not have the same ends, so it must stay one message.

A *slots plan* moves data through the slots of shared memory. Operations larger than a slot go through it in
blocks: every part of the inputs and outputs is cut into blocks of equal length, and blocks that are alike are
one loop. A *mapped plan* reads the tensors of other ranks in place. At its first fence the ranks find out
whether all tensors are mapped; if not, all of them run their slots plan. A *message plan* sends and receives,
also from and to slots where there are several hosts; see `overlap`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Any

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import (
    Buffer,
    Copy,
    Exchange,
    Fence,
    Fold,
    Schedule,
    Span,
    Step,
)
from dist2.backends.socket.host import CheckSizes, FindMemory, FoldByTorch, GivenUp
from dist2.backends.socket.layout import Layout
from dist2.backends.socket.overlap import MAPPED, SLOT, TENSOR, Aliases, Draft, Place
from dist2.backends.socket.reduction import Folding
from dist2.backends.socket.traffic import MessagePlan, Receive, Send
from dist2.backends.socket.transport.boards.control_words import ALL, NOBODY
from dist2.backends.socket.transport.boards.pieces import HALVES, kind_for
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES
from dist2.operation.engine import CONSTANTS, Plan

THROUGH: int = CONSTANTS["THROUGH"]
PAST: int = CONSTANTS["PAST"]
FILL: int = CONSTANTS["FILL"]
"""Ways of a copy: through the caches; past them; into a slot, past them if the readers' caches are far."""

LEAST_PAST = 3 << 20
"""Total bytes of a call's tensors from which on results of moves are stored past the caches."""

ONE_THREAD = 1 << 15
"""Elements up to which torch folds on one thread, as the core does."""

Counts = tuple[tuple[int, ...], tuple[int, ...]]
"""Elements of each input and output part in a block."""

Folds = Mapping[bool, Folding]
"""How contributions are folded into a result that is complete, or not; empty without a reduction."""


@attrs.frozen
class Blocks:
    """The blocks of a slots plan.

    Attributes:
        factory: Returns this rank's schedule for a block whose parts have these counts.
        numel: Elements of a part in a block.
        streams: Not all ranks wait for all: blocks go through pieces of the slots, and not through halves.
        note: Of the sizes of an exchange (module `sizes`): other ranks may have others, and more blocks
            than this one, which is found out at the first one. None for other operations.
    """

    factory: Callable[[tuple[int, ...], tuple[int, ...]], Schedule]
    numel: int
    streams: bool = False
    note: int | None = None


def slots_plan(rank: int, layout: Layout, folds: Folds, blocks: Blocks, in_place: bool = False) -> Plan:
    """Return a plan that moves data through slots.

    Args:
        rank: The group rank.
        layout: How the tensors are cut into parts.
        folds: For reductions.
        blocks: The schedules, block by block.
        in_place: The inputs are the outputs.
    """
    count = max(1, -(-max((*layout.inputs.numels, *layout.outputs.numels), default=0) // blocks.numel))
    plan = _plan_of(rank, layout)
    lowering = _Lowering(plan, layout, folds, in_place)
    number = None if blocks.note is None else count | blocks.note
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
    folds: Folds,
    schedule: Schedule,
    in_place: bool = False,
    note: int | None = None,
) -> Plan:
    """Return a plan that reads other ranks' tensors where they are mapped.

    Args:
        rank: The group rank.
        layout: How the tensors are cut into parts.
        folds: For reductions.
        schedule: Of a family whose ranks expose memory between the first fence and the last.
        in_place: The inputs are the outputs.
        note: For an exchange, whose ranks may differ in whether they run this plan: the number that those
            publish that do.
    """
    plan, steps = _plan_of(rank, layout), schedule.steps
    lowering = _Lowering(plan, layout, folds, in_place, schedule)
    first = next(at for at, step in enumerate(steps) if isinstance(step, Fence))
    before, after = steps[:first], steps[first + 1 :]
    if not any(isinstance(step, Fold) for step in after):  # copies are in vain if slots are used
        before, after = (), (*after[:-1], *before, after[-1])
    counts = layout.inputs.numels, layout.outputs.numels
    exposed = lowering.exposed
    plan.gathers = True
    if note is not None:
        plan.expect_shared(exposed)
    lowering.add(before, counts)
    plan.offer(exposed)
    plan.fence(ALL, checked=GivenUp(), number=note or 0)
    if note is not None:
        plan.noted(note, CheckSizes(note))
    plan.take(lowering.wanted, FindMemory())
    lowering.add(after, counts)
    return plan.seal()


def message_plan(
    rank: int,
    layout: Layout,
    folds: Folds,
    schedule: Schedule,
    in_place: bool = False,
    half: int = SLOT_BYTES,
    *,
    shift: int | None,
) -> MessagePlan:
    """Return a plan with messages.

    Args:
        rank: The group rank.
        layout: How the tensors are cut into parts: one tensor is one part.
        folds: For reductions.
        schedule: The schedule.
        in_place: The inputs are the outputs.
        half: Bytes of a half of a slot.
        shift: Element ``n`` of the inputs may be element ``n + shift`` of the outputs: the same memory; None:
            they share nothing.
    """
    draft, itemsize = Draft(), layout.dtype.itemsize
    lowering = _Lowering(draft, layout, folds, in_place, scratch=schedule.scratch)
    if any(isinstance(step, Fence) for step in schedule.steps):
        draft.claim(HALVES)
    lowering.add(schedule.steps, (layout.inputs.numels, layout.outputs.numels))
    inputs, outputs = layout.inputs.sizes(itemsize), layout.outputs.sizes(itemsize)
    scratch = lowering.scratch * itemsize
    plan = Plan(rank, inputs, [*outputs, scratch], half)
    aliases = Aliases(_starts(inputs), _starts(outputs), None if shift is None else shift * itemsize)
    messages = draft.add_to(plan, aliases)
    return MessagePlan(plan.seal(), scratch, messages)


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where each tensor lies in the concatenation of all, in bytes."""
    return tuple(accumulate(sizes, initial=0))[:-1]


def _plan_of(rank: int, layout: Layout) -> Plan:
    """Return an empty plan for the tensors of a call."""
    itemsize = layout.dtype.itemsize
    return Plan(rank, layout.inputs.sizes(itemsize), layout.outputs.sizes(itemsize))


def _alike(layout: Layout, blocks: Blocks, count: int) -> Iterator[tuple[int, Counts, int]]:
    """Yield the first block of each row of blocks that are alike: its number, its counts, and how many."""

    def counts_of(index: int) -> Counts:
        return layout.inputs.block(index, blocks.numel), layout.outputs.block(index, blocks.numel)

    index = 0
    while index < count:
        counts, turns = counts_of(index), 1
        if index or blocks.note is None:
            while index + turns < count and counts_of(index + turns) == counts:
                turns += 1
        yield index, counts, turns
        index += turns


class _Lowering:
    """Adds the steps of schedules to a plan, or to a draft.

    Attributes:
        wanted: Rank and part of each place in memory that others expose.
        exposed: The parts that this rank exposes.
        scratch: Elements of scratch that are needed.

    Args:
        plan: The plan or draft.
        layout: How the tensors are cut into parts.
        folds: For reductions.
        in_place: The inputs are the outputs.
        mapped: The schedule of a mapped plan.
        scratch: Elements of scratch that the schedule needs.
    """

    def __init__(
        self,
        plan: Any,
        layout: Layout,
        folds: Folds,
        in_place: bool,
        mapped: Schedule | None = None,
        scratch: int = 0,
    ) -> None:
        itemsize = self._itemsize = layout.dtype.itemsize
        self._plan = plan
        inputs = layout.inputs.tensors
        self._begins = {
            Buffer.INPUT: layout.inputs.begins(0, itemsize),
            Buffer.OUTPUT: layout.outputs.begins(inputs, itemsize),
        }
        self._dtype, self._folds, self._in_place = layout.dtype, folds, in_place
        total = itemsize * sum((*layout.inputs.numels, *layout.outputs.numels))
        moves = isinstance(plan, Plan) and mapped is None and not folds
        self._out = PAST if moves and total >= LEAST_PAST else THROUGH
        self._checked = None if mapped is None else GivenUp()
        self._ends: dict[Buffer, list[int]] = {}
        self._shift = 0
        self._messages = 0
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self.scratch = self._own_scratch = scratch
        self._scratch_at = inputs + layout.outputs.tensors
        lent = None if mapped is None else mapped.lends
        self.exposed = [] if lent is None else [(TENSOR, *begin) for begin in self._begins[lent]]
        self.wanted = [] if mapped is None else _wanted(mapped.steps)
        self._lends_output = lent is Buffer.OUTPUT

    def add(self, steps: Sequence[Step], counts: Counts, shift: int = 0, number: int | None = None) -> None:
        """Add the steps of a schedule.

        Args:
            steps: The steps.
            counts: Elements of each input and output part in the block.
            shift: Bytes from the beginning of a part to the block.
            number: Published with the fences, and compared behind them.
        """
        inputs, outputs = counts
        self._ends = {Buffer.INPUT: list(accumulate(inputs)), Buffer.OUTPUT: list(accumulate(outputs))}
        self._are_cut = len(inputs) > 1 or len(outputs) > 1
        self._shift = shift
        own: tuple[Place, Place, int] | None = None
        for step, behind in zip(steps, [*steps[1:], None], strict=False):
            if isinstance(step, Fence):
                self._fence(step, own, number)
                own = None
            elif isinstance(step, Copy):
                is_own = step.is_own
                if is_own and self._in_place:
                    assert step.dst.start == step.src.start  # or the schedule would overwrite its own input
                    continue
                stretches = self._stretches(step.dst, step.src)
                if is_own and stretches and isinstance(behind, Fence) and not self._lends_output:
                    # Other ranks never access this memory: it may be copied while they come.
                    *stretches, ((dst, src), nbytes) = stretches
                    own = dst, src, nbytes
                self._copy(stretches)
            elif isinstance(step, Fold):
                self._fold(step)
            else:
                self._exchange(step)

    def _fence(self, step: Fence, own: tuple[Place, Place, int] | None, number: int | None) -> None:
        assert step.awaited is None or len(step.awaited) < 2
        whom = ALL if step.awaited is None else step.awaited[0] if step.awaited else NOBODY
        self._plan.fence(whom, own, self._checked, number or 0)
        if number is not None:
            self._plan.noted(number, CheckSizes(number))

    def _copy(self, stretches: Sequence[tuple[list[Place], int]]) -> None:
        for (dst, src), nbytes in stretches:
            self._plan.copy(dst, src, nbytes, FILL if dst[0] == SLOT else self._out)

    def _fold(self, step: Fold) -> None:
        fold = self._folds[step.final]
        for places, nbytes in self._stretches(step.dst, *step.srcs):
            add_fold(self._plan, fold, self._dtype, places, nbytes // self._itemsize)

    def _exchange(self, step: Exchange) -> None:
        """Add messages; data that spans several tensors is packed before and unpacked after."""
        used = self._own_scratch
        sends, recvs, unpacking = [], [], []
        for send in step.sends:
            span, used = self._whole(send.span, used)
            if span is not send.span:
                self._copy(self._stretches(span, send.span))
            sends.append((Send(*self._message(send.peer, self._sent, span)), self._place(span)))
        for recv in step.recvs:
            span, used = self._whole(recv.span, used)
            if span is not recv.span:
                unpacking += self._stretches(recv.span, span)
            recvs.append((Receive(*self._message(recv.peer, self._received, span)), self._place(span)))
        self.scratch = max(self.scratch, used)
        self._plan.exchange(sends, recvs)
        self._copy(unpacking)

    def _message(self, peer: int, counted: defaultdict[int, int], span: Span) -> tuple[int, int, int, int]:
        """Return the fields of a `Message`."""
        step, number = counted[peer], self._messages
        counted[peer] += 1
        self._messages += 1
        return peer, step, span.numel * self._itemsize, number

    def _whole(self, span: Span, used: int) -> tuple[Span, int]:
        """Return a span in one part: itself, or scratch; and how much scratch is used then."""
        if not (self._are_cut and self._cuts(span)):
            return span, used
        return Span(Buffer.SCRATCH, used, used + span.numel), used + span.numel

    def _stretches(self, *spans: Span) -> list[tuple[list[Place], int]]:
        """Cut spans of one length at every end of a part in any of them; return places and bytes of each."""
        cuts = {0, spans[0].numel}
        if self._are_cut:
            cuts.update(*map(self._cuts, spans))
        return [
            (list(map(self._place, spans, repeat(start))), (stop - start) * self._itemsize)
            for start, stop in pairwise(sorted(cuts))
        ]

    def _cuts(self, span: Span) -> list[int]:
        """Return where ends of parts cut a span, counted from its start."""
        ends = self._ends.get(span.buffer, [])
        inside = ends[bisect_right(ends, span.start) : bisect_left(ends, span.stop)]
        return [end - span.start for end in inside]

    def _place(self, span: Span, start: int = 0) -> Place:
        """Return the place of an element of a span."""
        at, buffer = span.start + start, span.buffer
        if buffer is Buffer.SLOT:
            return (SLOT, span.owner, at * self._itemsize)
        if buffer is Buffer.LENT:
            return (MAPPED, self.wanted.index((span.owner, span.part)), at * self._itemsize)
        if buffer is Buffer.SCRATCH:
            return (TENSOR, self._scratch_at, at * self._itemsize)
        if span.start == span.stop:  # it may lie behind all parts
            return (TENSOR, self._scratch_at, 0)
        ends = self._ends[buffer]
        part = bisect_right(ends, at)
        which, begin = self._begins[buffer][part]
        return (TENSOR, which, begin + self._shift + (at - (ends[part - 1] if part else 0)) * self._itemsize)


def add_fold(plan: Any, fold: Folding, dtype: torch.dtype, places: Sequence[Place], numel: int) -> None:
    """Add a fold to a plan: by the core, or by torch where it has several threads or only it knows the fold.

    Args:
        plan: The plan, or a draft.
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


def _wanted(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Return rank and part of each place in memory that others expose."""
    found = set()
    for step in steps:
        srcs = (step.src,) if isinstance(step, Copy) else step.srcs if isinstance(step, Fold) else ()
        found.update([(span.owner, span.part) for span in srcs if span.buffer is Buffer.LENT])
    return sorted(found)
