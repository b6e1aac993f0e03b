# cython: annotation_typing=False
"""Building blocks of schedules: spans by name, steps without the empty ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from dist2.backends.socket.algorithms.schedule import (
    Buffer,
    Copy,
    Exchange,
    Fold,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
)


@lru_cache(maxsize=1024)
def source(start: int, stop: int) -> Span:
    """Elements of ``INPUT``."""
    return Span(Buffer.INPUT, start, stop)


@lru_cache(maxsize=1024)
def target(start: int, stop: int) -> Span:
    """Elements of ``OUTPUT``."""
    return Span(Buffer.OUTPUT, start, stop)


@lru_cache(maxsize=1024)
def slot(owner: int, start: int, stop: int) -> Span:
    """Elements of a rank's ``SLOT``."""
    return Span(Buffer.SLOT, start, stop, owner)


@lru_cache(maxsize=1024)
def lent(owner: int, part: int, start: int, stop: int) -> Span:
    """Elements of one part that another rank exposes."""
    return Span(Buffer.LENT, start, stop, owner, part)


@lru_cache(maxsize=1024)
def scratch(start: int, stop: int) -> Span:
    """Elements of ``SCRATCH``."""
    return Span(Buffer.SCRATCH, start, stop)


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Return where each part starts in the concatenation, and at last its length."""
    return [0, *accumulate(counts)]


def peers_after(rank: int, world_size: int) -> Iterator[int]:
    """Yield the other ranks, the next one first, so that ranks do not all start with the same peer."""
    for distance in range(1, world_size):
        yield (rank + distance) % world_size


def peers_before(rank: int, world_size: int) -> Iterator[int]:
    """Yield the other ranks in the order in which `peers_after` has them reach this one."""
    for distance in range(1, world_size):
        yield (rank - distance) % world_size


def assemble(
    steps: Iterable[Step],
    *,
    scratch: int = 0,
    slot: int = 0,
    lends: Buffer | None = None,
    streams: bool = False,
    sizes_known: bool = True,
) -> Schedule:
    """Make a schedule: drop empty steps, join adjacent copies.

    A message of no elements is dropped on both sides if both know its size. Otherwise it is sent, as its
    receiver may expect elements.
    """
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, Copy):
            if step.dst.numel:
                _append_copy(kept, step)
        elif isinstance(step, Fold):
            if step.dst.numel:
                kept.append(step)
        elif isinstance(step, Exchange):
            if sizes_known:
                step = _without_empty(step)
            if step.sends or step.recvs:
                kept.append(step)
        else:
            kept.append(step)
    return Schedule(tuple(kept), scratch, slot, lends, streams)


def _without_empty(step: Exchange) -> Exchange:
    sends = tuple([send for send in step.sends if send.span.start != send.span.stop])
    recvs = tuple([recv for recv in step.recvs if recv.span.start != recv.span.stop])
    return Exchange(sends, recvs) if len(sends) + len(recvs) < len(step.sends) + len(step.recvs) else step


def exchange(to: int, sent: Span, of: int, received: Span) -> Exchange:
    """Send one span and receive another."""
    return Exchange((Send(to, sent),), (Recv(of, received),))


def fold_in_order(result: Span, pieces: Sequence[Span], groups: Sequence[Sequence[int]]) -> list[Fold]:
    """Fold the contributions of all ranks, host by host and then the hosts (see `hosts.folding_groups`).

    Args:
        result: Where to.
        pieces: By rank; those in ``SCRATCH`` may be overwritten.
        groups: Ranks of each host; at least one piece of a host with several is in ``SCRATCH``.
    """
    partials, steps = [], []
    for group in groups:
        mine = [pieces[rank] for rank in group]
        partial = mine[0] if len(mine) == 1 else next(span for span in mine if span.buffer is Buffer.SCRATCH)
        if len(mine) > 1:
            steps.append(Fold(partial, tuple(mine), final=False))
        partials.append(partial)
    return [*steps, Fold(result, tuple(partials))]


def _append_copy(steps: list[Step], copy: Copy) -> None:
    last = steps[-1] if steps else None
    if isinstance(last, Copy) and _continues(last.dst, copy.dst) and _continues(last.src, copy.src):
        steps[-1] = Copy(_joined(last.dst, copy.dst), _joined(last.src, copy.src))
    else:
        steps.append(copy)


def _continues(first: Span, second: Span) -> bool:
    memory = (first.buffer, first.owner, first.part)
    return memory == (second.buffer, second.owner, second.part) and first.stop == second.start


def _joined(first: Span, second: Span) -> Span:
    return Span(first.buffer, first.start, second.stop, first.owner, first.part)
