# cython: annotation_typing=False
"""Schedules: the steps of one rank in a collective, as pure data.

An algorithm is a pure function ``(rank, world_size, ...) -> Schedule``. It knows ranks and element
ranges, never sockets, dtypes or memory; the same schedule runs under an executor, and under the checker
of the tests.

Buffers hold *elements*, numbered from 0. ``INPUT`` and ``OUTPUT`` are the caller's (in-place operations have
the same memory in both; a schedule must be right for both cases where its operation allows them), ``SCRATCH``
is private to the rank, ``SLOT`` is a rank's part of shared memory: its owner writes it, every rank of the
host reads it. ``LENT`` is memory of another rank's caller, exposed for the duration of the operation: that
rank's ``INPUT`` or ``OUTPUT``, as its schedule says. Only its owner writes it.

A schedule is a sequence of steps. `Exchange` starts all its messages at once and ends when all are done; the
other steps are local, except `Fence`. A fence returns when every rank of the host has reached it, or those
that it waits for, and makes their earlier writes to slots visible. A rank may not write memory that another
one touches unless one of the two has waited for the other in between. Exposed memory belongs to its caller
before the first fence and after the last.
"""

from __future__ import annotations

import enum

import attrs


class Buffer(enum.Enum):
    """The memory that holds a span."""

    __hash__ = object.__hash__  # a member is one object; that of `Enum` is a call in Python

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    SLOT = "slot"
    LENT = "lent"


@attrs.frozen
class Span:
    """Elements ``[start, stop)`` of a buffer.

    Attributes:
        buffer: Which memory.
        start: First element.
        stop: One past the last.
        owner: For ``SLOT`` and ``LENT``: the group rank whose memory it is.
        part: For ``LENT``: in which of the parts that its owner lends; elements count from its start, as
            no rank knows how long the other parts are.
    """

    buffer: Buffer
    start: int
    stop: int
    owner: int = -1
    part: int = 0

    @property
    def numel(self) -> int:
        return self.stop - self.start


@attrs.frozen
class Send:
    """Send a span to a group rank."""

    peer: int
    span: Span


@attrs.frozen
class Recv:
    """Receive a span from a group rank."""

    peer: int
    span: Span


@attrs.frozen
class Exchange:
    """Messages in flight together. Between two ranks and one way, they match in order of appearance."""

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()


@attrs.frozen
class Copy:
    """Copy a span to another of the same length.

    Attributes:
        dst: Where to.
        src: Where from.
    """

    dst: Span
    src: Span

    @property
    def is_own(self) -> bool:
        """Whether it is from an input of the caller's to an output."""
        return self.src.buffer is Buffer.INPUT and self.dst.buffer is Buffer.OUTPUT


@attrs.frozen
class Fold:
    """Combine spans of one length, in the order given, into ``dst`` (which may be one of them).

    Attributes:
        final: Whether the result is complete: then an average is divided, a half-precision
            accumulation rounded. Only exact reductions may be folded in several steps.
    """

    dst: Span
    srcs: tuple[Span, ...]
    final: bool = True


@attrs.frozen
class Fence:
    """Arrive at a fence, and wait for every rank of this host.

    Attributes:
        awaited: Wait for these alone, if they are given: for none, or for one.
    """

    awaited: tuple[int, ...] | None = None


Step = Exchange | Copy | Fold | Fence


@attrs.frozen
class Schedule:
    """The steps of one rank.

    Attributes:
        steps: In order.
        scratch: Elements of ``SCRATCH`` needed.
        slot: Elements of each rank's ``SLOT`` needed; 0 where no shared memory is used.
        lends: Which of its buffers the rank lends to the others.
        streams: Not all wait for all at its fence. So it has a piece of ``SLOT`` to itself, which is used
            again once all have come to a later fence. Equal on all ranks.
    """

    steps: tuple[Step, ...]
    scratch: int = 0
    slot: int = 0
    lends: Buffer | None = None
    streams: bool = False


def chunk_bounds(numel: int, parts: int) -> list[int]:
    """Cut ``numel`` elements into ``parts`` chunks, the first ones one longer; ``parts + 1`` bounds."""
    size, longer = divmod(numel, parts)
    return [part * size + min(part, longer) for part in range(parts + 1)]
