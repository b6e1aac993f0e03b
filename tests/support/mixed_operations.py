"""Operations of all kinds in a few milliseconds, to be interrupted by signals."""

from __future__ import annotations

import torch

from dist2 import ProcessGroup


def some_of_everything(pg: ProcessGroup, later_numel: int = 30_000) -> None:
    """Check results of collectives and messages, short and long, synchronous and asynchronous."""
    peer = 1 - pg.rank()
    total = torch.ones(3)
    pg.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    later = torch.ones(later_numel)
    reducing = pg.all_reduce(later, async_op=True)
    for numel in (2, 40_000):
        got = torch.empty(numel)
        sending = pg.isend(torch.full((numel,), float(pg.rank())), peer)
        pg.recv(got, peer)
        assert got[-1].item() == peer
        sending.wait()
    reducing.wait()
    assert later.eq(2.0).all()
