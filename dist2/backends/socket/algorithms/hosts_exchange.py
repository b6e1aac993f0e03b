"""`all_to_all` over several hosts whose ranks access each other's tensors: two fences.

A part for another host goes directly to its destination rank; a detour would not save bytes. Inside a host a
rank reads its parts from the others' tensors while its messages are on the wire. Parts are cut into pieces
that are sent without an announcement, in rounds: one piece to and from each rank, then the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dist2.backends.socket.algorithms.hosts import host_map
from dist2.backends.socket.algorithms.schedule import (
    Buffer,
    Copy,
    Exchange,
    Fence,
    Recv,
    Schedule,
    Send,
    Span,
    Step,
)
from dist2.backends.socket.algorithms.spans import (
    assemble,
    lent,
    offsets_of,
    peers_after,
    peers_before,
    source,
    target,
)

MOST_BESIDE = 16
"""Most ranks of a host: the table of exposed memory has room for start and end of so many parts."""
MOST_PIECES = 4
"""Longer parts are not cut: they are announced, and sent on request, so that no credit delays them."""


def all_to_all(
    rank: int, layout: tuple[int, ...], sent: Sequence[int], received: Sequence[int], piece: int
) -> Schedule:
    """Exchange parts; sizes may differ by pair, and no rank knows the sizes of other pairs.

    Args:
        rank: The rank that the schedule is for.
        layout: Number of each rank's host.
        sent: Elements for each rank.
        received: Elements from each rank.
        piece: Elements of a message; both sides of a part know how it is cut.
    """
    world_size, beside = len(layout), host_map(layout).beside(rank)
    outgoing, incoming = offsets_of(sent), offsets_of(received)
    together: list[Step] = [Fence()] if len(beside) > 1 else []
    near: list[Step] = [Copy(target(*incoming[rank : rank + 2]), source(*outgoing[rank : rank + 2]))]
    sends: dict[int, list[Send]] = {}
    recvs: dict[int, list[Recv]] = {}
    for peer in peers_after(rank, world_size):
        if peer in beside:
            taken = target(*incoming[peer : peer + 2])
            near.append(Copy(taken, lent(peer, rank, 0, taken.numel)))
            continue
        for turn, span in enumerate(_pieces(source(*outgoing[peer : peer + 2]), piece)):
            sends.setdefault(turn, []).append(Send(peer, span))
    for peer in peers_before(rank, world_size):
        if peer not in beside:
            for turn, span in enumerate(_pieces(target(*incoming[peer : peer + 2]), piece)):
                recvs.setdefault(turn, []).append(Recv(peer, span))
    rounds = [
        Exchange(tuple(sends.get(turn, ())), tuple(recvs.get(turn, ())))
        for turn in range(max(len(sends), len(recvs)))
    ]
    return assemble(
        [*together, *rounds[:1], *near, *rounds[1:], *together], lends=Buffer.INPUT if together else None
    )


def _pieces(part: Span, piece: int) -> Iterator[Span]:
    """Cut a part that goes to another host, or comes from there."""
    stride = max(1, piece)
    if part.numel > MOST_PIECES * stride:
        stride = part.numel
    for start in range(part.start, part.stop, stride):
        yield Span(part.buffer, start, min(start + stride, part.stop))
