"""The operations of the drill: each is called on all ranks, and checks what it computed."""

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


def broadcast(pg: ProcessGroup) -> None:
    tensor = torch.full((SMALL,), 7.0 if pg.rank() == 0 else 0.0)
    pg.broadcast(tensor, root=0)
    _expect(tensor, 7.0)


def all_to_all(pg: ProcessGroup) -> None:
    mine = torch.full((pg.size() * SMALL,), float(pg.rank()))
    theirs = torch.empty_like(mine)
    pg.all_to_all_single(theirs, mine)
    for rank, part in enumerate(theirs.split(SMALL)):
        _expect(part, rank)


def barrier(pg: ProcessGroup) -> None:
    pg.barrier()


def send_recv(pg: ProcessGroup) -> None:
    """Pass a tensor around the ring; longer than what may be sent unreceived."""
    rank, size = pg.rank(), pg.size()
    before = torch.empty(LARGE // 2)
    sending = pg.isend(torch.full((LARGE // 2,), float(rank)), (rank + 1) % size)
    pg.recv(before, (rank - 1) % size)
    sending.wait()
    _expect(before, (rank - 1) % size)


OPERATIONS: dict[str, Call] = {
    "all_reduce_small": all_reduce_small,
    "all_reduce_large": all_reduce_large,
    "async_all_reduce": async_all_reduce,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "send_recv": send_recv,
}


def verify(pg: ProcessGroup) -> None:
    """Check that a group works: short, long, asynchronous and point-to-point."""
    for call in (all_reduce_small, async_all_reduce, send_recv, all_to_all, barrier):
        call(pg)


def something_else(pg: ProcessGroup) -> None:
    """Call what no other rank does."""
    pg.all_reduce(torch.ones(3, dtype=torch.int16))
    pg.barrier()
