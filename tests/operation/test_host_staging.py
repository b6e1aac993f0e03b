"""Tensors by way of the host: with those on the CPU in the place of those on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.ranks import TENANTS, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket.backend import SocketBackend

SIZE = 3


@pytest.fixture(autouse=True)
def all_staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SocketBackend, "staged_types", ("cpu",))
    yield


def test_results_are_in_the_callers_tensors() -> None:
    def body(pg: ProcessGroup) -> None:
        me = pg.rank()
        for async_op in (False, True):
            mine = torch.full((2, 4), me + 1.0)
            pg.all_reduce(mine, async_op=async_op).wait()
            assert mine.tolist() == [[6.0] * 4] * 2
            spread = torch.full((8,), me + 1.0)[::2]
            pg.broadcast(spread, 1, async_op=async_op).wait()
            assert spread.tolist() == [2.0] * 4
            parts = [torch.empty(2) for _ in range(SIZE)]
            pg.all_gather(parts, torch.full((2,), float(me)), async_op=async_op).wait()
            assert [part[0].item() for part in parts] == [0.0, 1.0, 2.0]
            whole = torch.full((SIZE * 2,), float(me))
            pg.all_gather_single(whole, whole[2 * me : 2 * me + 2], async_op=async_op).wait()
            assert whole.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
            root = torch.full((2,), me + 1.0)
            pg.reduce(root, 1, async_op=async_op).wait()
            assert root.tolist() == ([6.0] * 2 if me == 1 else [me + 1.0] * 2)
        pg.barrier()

    run_ranks(SIZE, body, TENANTS[0])


def test_messages() -> None:
    def body(pg: ProcessGroup) -> None:
        right, left = (pg.rank() + 1) % SIZE, (pg.rank() - 1) % SIZE
        for numel in (1, 300_000):
            got = torch.empty(numel)
            sending = pg.isend(torch.full((numel,), float(pg.rank())), right)
            receiving = pg.irecv(got, left)
            receiving.wait()
            sending.wait()
            assert got[-1].item() == left
            assert receiving.source_rank() == left

    run_ranks(SIZE, body, TENANTS[0])
