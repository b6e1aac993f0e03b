"""Plans: schedules in bytes, for given lists of tensors.

The elements of a schedule number the concatenation of a list of tensors, so a span may lie in several of
them. Local steps are cut at the ends of tensors. A message that lies across one goes through a piece of
scratch: the other side need not have the same ends, so it must stay one message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Exchange, Fold, Schedule, Span
from dist2.backends.socket.reduction import Fold as FoldFunction
from dist2.backends.socket.reduction import bind_fold
from dist2.errors import InvalidUsageError
from dist2.ops import Reduction


@attrs.frozen(cache_hash=True)
class Place:
    """Where a stretch of elements lies.

    Attributes:
        memory: Which tensor: inputs first, then outputs, then scratch.
        start: First byte.
        stop: One past the last.
    """

    memory: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Message = tuple[int, int, Place]
"""Peer, number of the message between the two ranks in this direction, and its place."""


@attrs.frozen
class Messages:
    """Start these messages and wait for them."""

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


@attrs.frozen
class Move:
    """Copy bytes."""

    dst: Place
    src: Place


@attrs.frozen(eq=False)
class Combine:
    """Fold elements."""

    fold: FoldFunction
    dst: Place
    srcs: tuple[Place, ...]


Action = Messages | Move | Combine


@attrs.frozen(eq=False)
class Plan:
    """A schedule with everything worked out that does not depend on the tensors' addresses.

    Attributes:
        actions: In order.
        dtype: Of all tensors.
        scratch: Bytes of scratch needed.
    """

    actions: tuple[Action, ...]
    dtype: torch.dtype
    scratch: int


def plan_of(
    schedule: Schedule,
    dtype: torch.dtype,
    reduction: Reduction | None,
    world_size: int,
    input_numels: Sequence[int],
    output_numels: Sequence[int],
) -> Plan:
    """Plan a schedule for lists of tensors with these numbers of elements.

    Raises:
        InvalidUsageError: The reduction has no meaning for the dtype.
    """
    planner = _Planner(schedule, dtype, input_numels, output_numels)
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
            raise InvalidUsageError(f"a message schedule has no {type(step).__name__}")
    return Plan(tuple(planner.actions), dtype, planner.scratch * dtype.itemsize)


class _Planner:
    """Turns steps into actions, one after the other."""

    def __init__(
        self,
        schedule: Schedule,
        dtype: torch.dtype,
        input_numels: Sequence[int],
        output_numels: Sequence[int],
    ) -> None:
        self.actions: list[Action] = []
        self.scratch = schedule.scratch
        self._own_scratch = schedule.scratch
        self._itemsize = dtype.itemsize
        # By buffer: the tensors' ends in elements, and the number of the first of them.
        self._ends = {
            Buffer.INPUT: list(accumulate(input_numels)),
            Buffer.OUTPUT: list(accumulate(output_numels)),
            Buffer.SCRATCH: [1 << 62],
        }
        self._first = {
            Buffer.INPUT: 0,
            Buffer.OUTPUT: len(input_numels),
            Buffer.SCRATCH: len(input_numels) + len(output_numels),
        }
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def copy(self, step: Copy) -> None:
        """Plan a copy."""
        for dst, src in self._aligned(step.dst, step.src):
            self.actions.append(Move(dst, src))

    def fold(self, step: Fold, fold: FoldFunction) -> None:
        """Plan a fold."""
        for dst, *srcs in self._aligned(step.dst, *step.srcs):
            self.actions.append(Combine(fold, dst, tuple(srcs)))

    def exchange(self, step: Exchange) -> None:
        """Plan messages; what lies across tensors is packed before and unpacked after."""
        used = self._own_scratch
        packing, unpacking = [], []
        sends: list[Message] = []
        recvs: list[Message] = []
        for send in step.sends:
            span, used, staged = self._whole(send.span, used)
            packing += [Copy(span, send.span)] if staged else []
            sends.append((send.peer, self._sent[send.peer], self._place(span)))
            self._sent[send.peer] += 1
        for recv in step.recvs:
            span, used, staged = self._whole(recv.span, used)
            unpacking += [Copy(recv.span, span)] if staged else []
            recvs.append((recv.peer, self._received[recv.peer], self._place(span)))
            self._received[recv.peer] += 1
        self.scratch = max(self.scratch, used)
        for copy in packing:
            self.copy(copy)
        self.actions.append(Messages(tuple(sends), tuple(recvs)))
        for copy in unpacking:
            self.copy(copy)

    def _whole(self, span: Span, used: int) -> tuple[Span, int, bool]:
        """Return a span in one tensor, with how much scratch is used then, and if it is a stand-in."""
        if not self._cuts(span):
            return span, used, False
        return Span(Buffer.SCRATCH, used, used + span.numel), used + span.numel, True

    def _cuts(self, span: Span) -> list[int]:
        """Return where ends of tensors cut a span, counted from its start."""
        return [end - span.start for end in self._ends[span.buffer] if span.start < end < span.stop]

    def _aligned(self, *spans: Span) -> list[list[Place]]:
        """Cut spans of one length at every end of a tensor in any of them."""
        cuts = sorted({0, spans[0].numel, *(cut for span in spans for cut in self._cuts(span))})
        return [
            [self._place(Span(span.buffer, span.start + low, span.start + high)) for span in spans]
            for low, high in pairwise(cuts)
        ]

    def _place(self, span: Span) -> Place:
        """Return where a span lies that is within one tensor."""
        ends = self._ends[span.buffer]
        index = bisect_right(ends, span.start)
        start = ends[index - 1] if index else 0
        low, high = span.start - start, span.stop - start
        return Place(self._first[span.buffer] + index, low * self._itemsize, high * self._itemsize)
