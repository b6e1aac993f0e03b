"""Threads as ranks read each other's tensors in place: misaligned ones, and with one rank held up."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
import torch
from support.oracle import example, reduced
from support.ranks import TENANTS, run_ranks
from torch.distributed import ReduceOp

from dist2 import OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.host import FoldByTorch, Host
from dist2.operation.kinds import Reduction

SHM = TENANTS[2]
MAPPED = attrs.evolve(SHM, options={**SHM.options, "algorithm": "mapped"})
BORDERS = (0, 1, 255, 256, 257, 32_767, 32_768, 32_769, 262_143, 262_144, 262_145)
"""Elements of float32 around 1 KiB, 128 KiB and 1 MiB: the sizes of pieces and slots."""
REUSED = -2.0


def misaligned(values: torch.Tensor, by: int) -> torch.Tensor:
    """Return a copy whose first byte is at no multiple of the size of an element."""
    memory = bytearray(values.nbytes + by + values.itemsize)
    if not values.numel():
        return values.clone()
    return torch.frombuffer(memory, dtype=values.dtype, offset=by, count=values.numel()).copy_(values)


@pytest.mark.parametrize("tenant", [SHM, MAPPED], ids=["chosen", "mapped"])
def test_sizes_around_blocks_on_misaligned_tensors(tenant: Any) -> None:
    def body(pg: ProcessGroup) -> None:
        me, size = pg.rank(), pg.size()
        for numel in BORDERS:
            everyone = [example((numel,), torch.float32, rank) for rank in range(size)]
            for by in (0, 1, me):
                mine = misaligned(everyone[me], by)
                pg.all_reduce(mine)
                assert torch.equal(mine, reduced(everyone, Reduction.of(ReduceOp.SUM)))
                whole = misaligned(torch.zeros(numel * size), by)
                pg.all_gather_single(whole, misaligned(everyone[me], by))
                assert torch.equal(whole, torch.cat(everyone))
                lengths = [numel * (rank == 0) + rank for rank in range(size)]  # rank 0 has more blocks
                got = misaligned(torch.zeros(sum(lengths)), by)
                sent = misaligned(torch.full((lengths[me] * size,), float(me)), by)
                pg.all_to_all_single(got, sent, lengths, [lengths[me]] * size)
                expected = [torch.full((length,), float(rank)) for rank, length in enumerate(lengths)]
                assert torch.equal(got, torch.cat(expected))

    run_ranks(3, body, tenant, timeout=40.0)


def test_a_rank_that_was_held_up_returns_nothing_read_after_the_others_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its fold reads memory that belongs to the other's caller again by then."""
    original, gave_up, armed = FoldByTorch.do, threading.Event(), threading.Event()

    def held(self: FoldByTorch, host: Host, operation: Any, script: Any, at: int) -> int:
        if armed.is_set() and host.board.rank == 1:
            gave_up.wait(20)
        return original(self, host, operation, script, at)

    monkeypatch.setattr(FoldByTorch, "do", held)

    def body(pg: ProcessGroup) -> None:
        mine = torch.ones(100_000)
        pg.all_reduce(mine, ReduceOp.PRODUCT)  # which torch folds
        pg.barrier()
        armed.set()
        if pg.rank() == 0:
            with pytest.raises(OperationTimeoutError) as caught:
                pg.all_reduce(mine, ReduceOp.PRODUCT, timeout=0.3)
            assert caught.value.missing == (1,)
            mine.fill_(REUSED)
            gave_up.set()
        else:
            with pytest.raises(PeerLostError):
                pg.all_reduce(mine, ReduceOp.PRODUCT)
        if pg.rank() == 0:
            assert mine.eq(REUSED).all(), "written to after the call had failed"

    run_ranks(2, body, MAPPED)
