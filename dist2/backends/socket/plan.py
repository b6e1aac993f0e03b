"""Plans: schedules in bytes, for given lists of tensors.

The elements of a schedule number the concatenation of a list of tensors, so a span may lie in several of
them. Local steps are cut at the ends of tensors. A message that lies across one goes through a piece of
scratch: the other side need not have the same ends, so it must stay one message.

A schedule says that an `Exchange` ends when all its messages are done. A plan is less strict: each action
waits for those messages alone whose memory it touches, and receives are posted as soon as nothing
before them touches theirs (see `overlap.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Exchange, Fence, Fold, Schedule, Span
from dist2.backends.socket.overlap import (
    Action,
    Combine,
    Meet,
    Memories,
    Message,
    Messages,
    Move,
    Place,
    overlapped,
)
from dist2.backends.socket.reduction import Fold as FoldFunction
from dist2.backends.socket.reduction import bind_fold
from dist2.errors import InvalidUsageError
from dist2.operation.kinds import Reduction


@attrs.frozen(eq=False)
class Plan:
    """A schedule with everything computed that does not depend on the tensors' addresses.

    Attributes:
        actions: In order.
        dtype: The dtype of all tensors.
        scratch: Bytes of scratch needed.
        messages: How many messages there are: they are numbered from 0.
        meets: Whether ranks of this host meet in shared memory.
    """

    actions: tuple[Action, ...]
    dtype: torch.dtype
    scratch: int
    messages: int
    meets: bool


def plan_of(
    schedule: Schedule,
    dtype: torch.dtype,
    reduction: Reduction | None,
    world_size: int,
    input_numels: Sequence[int],
    output_numels: Sequence[int],
    *,
    beside: Sequence[int] = (),
    shift: int | None,
) -> Plan:
    """Plan a schedule for lists of tensors with these numbers of elements.

    Args:
        beside: The ranks of this host, whose slots can be reached.
        shift: Element ``n`` of the inputs may be element ``n + shift`` of the outputs: the same memory; None:
            they share nothing.

    Raises:
        InvalidUsageError: The reduction has no meaning for the dtype.
    """
    planner = _Planner(schedule, dtype, input_numels, output_numels, beside)
    folds: dict[bool, FoldFunction] = {}
    if reduction is not None:
        folds = {final: bind_fold(reduction, dtype, world_size, final) for final in (False, True)}
    for step in schedule.steps:
        if isinstance(step, Exchange):
            planner.exchange(step)
        elif isinstance(step, Copy):
            planner.copy(step)
        elif isinstance(step, Fold):
            planner.fold(step, folds[step.final])
        else:
            planner.meet(step)
    itemsize = dtype.itemsize
    memories = Memories(
        _starts(input_numels, itemsize),
        _starts(output_numels, itemsize),
        None if shift is None else shift * itemsize,
    )
    actions = overlapped(planner.actions, memories)
    meets = any(isinstance(action, Meet) for action in actions)
    return Plan(actions, dtype, planner.scratch * itemsize, planner.messages, meets)


def _starts(numels: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * end for end in accumulate(numels[:-1], initial=0)) if numels else ()


class _Planner:
    """Turns steps into actions, one after the other."""

    def __init__(
        self,
        schedule: Schedule,
        dtype: torch.dtype,
        input_numels: Sequence[int],
        output_numels: Sequence[int],
        beside: Sequence[int],
    ) -> None:
        self.actions: list[Action] = []
        self.scratch = schedule.scratch
        self.messages = 0
        self._own_scratch = schedule.scratch
        self._itemsize = dtype.itemsize
        # By buffer: the tensors' ends in elements, and the number of the first of them.
        self._ends = {
            Buffer.INPUT: list(accumulate(input_numels)),
            Buffer.OUTPUT: list(accumulate(output_numels)),
            Buffer.SCRATCH: [1 << 62],
            Buffer.SLOT: [1 << 62],
        }
        scratch = len(input_numels) + len(output_numels)
        self._first = {Buffer.INPUT: 0, Buffer.OUTPUT: len(input_numels), Buffer.SCRATCH: scratch}
        self._slots = {owner: scratch + 1 + index for index, owner in enumerate(beside)}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def meet(self, step: Fence) -> None:
        """Plan a fence."""
        if not self._slots:
            raise InvalidUsageError(f"a message schedule has no {type(step).__name__}")
        self.actions.append(Meet())

    def copy(self, step: Copy) -> None:
        """Plan a copy."""
        for dst, src in self._aligned(step.dst, step.src):
            self.actions.append(Move(dst, src))

    def fold(self, step: Fold, fold: FoldFunction) -> None:
        """Plan a fold."""
        for dst, *srcs in self._aligned(step.dst, *step.srcs):
            self.actions.append(Combine(fold, dst, tuple(srcs)))

    def exchange(self, step: Exchange) -> None:
        """Plan messages; data that spans several tensors is packed before and unpacked after."""
        used = self._own_scratch
        packing, unpacking = [], []
        sends: list[Message] = []
        recvs: list[Message] = []
        for send in step.sends:
            span, used, staged = self._whole(send.span, used)
            packing += [Copy(span, send.span)] if staged else []
            sends.append(self._message(send.peer, self._sent, span))
        for recv in step.recvs:
            span, used, staged = self._whole(recv.span, used)
            unpacking += [Copy(recv.span, span)] if staged else []
            recvs.append(self._message(recv.peer, self._received, span))
        self.scratch = max(self.scratch, used)
        for copy in packing:
            self.copy(copy)
        self.actions.append(Messages(tuple(sends), tuple(recvs)))
        for copy in unpacking:
            self.copy(copy)

    def _message(self, peer: int, counted: Counter[int], span: Span) -> Message:
        step = counted[peer]
        counted[peer] += 1
        self.messages += 1
        return Message(peer, step, self._place(span), self.messages - 1)

    def _whole(self, span: Span, used: int) -> tuple[Span, int, bool]:
        """Return a span in one tensor, with how much scratch is used then, and if it is scratch."""
        if not self._cuts(span):
            return span, used, False
        return Span(Buffer.SCRATCH, used, used + span.numel), used + span.numel, True

    def _cuts(self, span: Span) -> list[int]:
        """Return where ends of tensors cut a span, counted from its start."""
        return [end - span.start for end in self._ends[span.buffer] if span.start < end < span.stop]

    def _aligned(self, *spans: Span) -> list[list[Place]]:
        """Cut spans of one length at every end of a tensor in any of them."""
        cuts = sorted({0, spans[0].numel, *(cut for span in spans for cut in self._cuts(span))})
        return [[self._place(_stretch(span, low, high)) for span in spans] for low, high in pairwise(cuts)]

    def _place(self, span: Span) -> Place:
        """Return where a span lies that is within one tensor."""
        if span.buffer is Buffer.SLOT:
            memory, start = self._slots[span.owner], 0
        else:
            ends = self._ends[span.buffer]
            index = min(bisect_right(ends, span.start), len(ends) - 1)  # an empty span may lie behind all
            memory, start = self._first[span.buffer] + index, ends[index - 1] if index else 0
        low, high = span.start - start, span.stop - start
        return Place(memory, low * self._itemsize, high * self._itemsize)


def _stretch(span: Span, start: int, stop: int) -> Span:
    """Return some elements of a span, counted from its start."""
    return Span(span.buffer, span.start + start, span.start + stop, span.owner)
