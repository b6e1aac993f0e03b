"""The operations of the drill: each is called on all ranks, and checks its result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dist2 import ProcessGroup

SMALL, LARGE = 16, 1_000_000

Call = Callable[[ProcessGroup], None]


def _expect(tensor: torch.Tensor, value: float) -> None:
    wrong = int((tensor != value).sum())
    assert not wrong, f"{wrong} of {tensor.numel()} values are not {value}: {tensor[tensor != value][:3]}"


def _all_reduce(pg: ProcessGroup, numel: int, *, async_op: bool = False) -> None:
    tensor = torch.full((numel,), float(pg.rank() + 1))
    pg.all_reduce(tensor, async_op=async_op).wait()
    _expect(tensor, pg.size() * (pg.size() + 1) / 2)


def all_reduce_small(pg: ProcessGroup) -> None:
    _all_reduce(pg, SMALL)


def all_reduce_large(pg: ProcessGroup) -> None:
    _all_reduce(pg, LARGE)


def async_all_reduce(pg: ProcessGroup) -> None:
    _all_reduce(pg, LARGE // 4, async_op=True)


def async_all_reduce_small(pg: ProcessGroup) -> None:
    _all_reduce(pg, SMALL, async_op=True)


def _broadcast(pg: ProcessGroup, numel: int, *, async_op: bool = False) -> None:
    tensor = torch.full((numel,), 7.0 if pg.rank() == 0 else 0.0)
    pg.broadcast(tensor, root=0, async_op=async_op).wait()
    _expect(tensor, 7.0)


def broadcast(pg: ProcessGroup) -> None:
    _broadcast(pg, SMALL)


def broadcast_large(pg: ProcessGroup) -> None:
    _broadcast(pg, LARGE)


def async_broadcast(pg: ProcessGroup) -> None:
    _broadcast(pg, LARGE // 4, async_op=True)


def _all_to_all(pg: ProcessGroup, numel: int) -> None:
    mine = torch.full((pg.size() * numel,), float(pg.rank()))
    theirs = torch.empty_like(mine)
    pg.all_to_all_single(theirs, mine)
    for rank, part in enumerate(theirs.split(numel)):
        _expect(part, rank)


def all_to_all(pg: ProcessGroup) -> None:
    _all_to_all(pg, SMALL)


def all_to_all_large(pg: ProcessGroup) -> None:
    _all_to_all(pg, LARGE // 8)


def gather(pg: ProcessGroup) -> None:
    """Ranks other than the root are done when they have sent."""
    parts = [torch.empty(SMALL) for _ in range(pg.size())] if pg.rank() == 0 else []
    pg.gather(parts, torch.full((SMALL,), float(pg.rank())), root=0)
    for rank, part in enumerate(parts):
        _expect(part, rank)


def barrier(pg: ProcessGroup) -> None:
    pg.barrier()


def monitored_barrier(pg: ProcessGroup) -> None:
    pg.monitored_barrier()


def _send_recv(pg: ProcessGroup, numel: int) -> None:
    rank, size = pg.rank(), pg.size()
    before = torch.empty(numel)
    sending = pg.isend(torch.full((numel,), float(rank)), (rank + 1) % size)
    pg.recv(before, (rank - 1) % size)
    sending.wait()
    _expect(before, (rank - 1) % size)


def send_recv(pg: ProcessGroup) -> None:
    """Pass a tensor around the ring; it is longer than the credit."""
    _send_recv(pg, LARGE // 2)


def send_recv_small(pg: ProcessGroup) -> None:
    _send_recv(pg, SMALL)


def _pairs(pg: ProcessGroup, numel: int, works: Callable[..., None]) -> None:
    """Ranks 0 and 1, 2 and 3, ... send to each other only."""
    other = pg.rank() ^ 1
    if other < pg.size():
        theirs = torch.empty(numel)
        works(pg, torch.full((numel,), float(pg.rank())), theirs, other)
        _expect(theirs, other)


def _in_turn(pg: ProcessGroup, mine: torch.Tensor, theirs: torch.Tensor, other: int) -> None:
    if pg.rank() < other:
        pg.send(mine, other)
        pg.recv(theirs, other)
    else:
        pg.recv(theirs, other)
        pg.send(mine, other)


def _at_once(pg: ProcessGroup, mine: torch.Tensor, theirs: torch.Tensor, other: int) -> None:
    works = [pg.irecv(theirs, other), pg.isend(mine, other)]
    for work in works:
        work.wait()


def pairs(pg: ProcessGroup) -> None:
    _pairs(pg, SMALL, _in_turn)


def pairs_large(pg: ProcessGroup) -> None:
    _pairs(pg, LARGE, _in_turn)


def async_pairs(pg: ProcessGroup) -> None:
    _pairs(pg, SMALL, _at_once)


def async_pairs_large(pg: ProcessGroup) -> None:
    _pairs(pg, LARGE, _at_once)


OPERATIONS: dict[str, Call] = {
    "all_reduce_small": all_reduce_small,
    "all_reduce_large": all_reduce_large,
    "async_all_reduce_small": async_all_reduce_small,
    "async_all_reduce": async_all_reduce,
    "broadcast": broadcast,
    "broadcast_large": broadcast_large,
    "async_broadcast": async_broadcast,
    "gather": gather,
    "all_to_all": all_to_all,
    "all_to_all_large": all_to_all_large,
    "barrier": barrier,
    "monitored_barrier": monitored_barrier,
    "send_recv_small": send_recv_small,
    "send_recv": send_recv,
    "pairs": pairs,
    "pairs_large": pairs_large,
    "async_pairs": async_pairs,
    "async_pairs_large": async_pairs_large,
}


def verify(pg: ProcessGroup) -> None:
    """Check that a group works: short, long, asynchronous and point-to-point."""
    for call in (all_reduce_small, async_all_reduce, send_recv, all_to_all, barrier):
        call(pg)


def something_else(pg: ProcessGroup) -> None:
    """Call an operation that no other rank calls."""
    pg.all_reduce(torch.ones(3, dtype=torch.int16))
    pg.barrier()
