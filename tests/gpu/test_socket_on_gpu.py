"""Tensors on a GPU in a group of the socket backend: copied to pinned memory and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gpu_ranks import late, run_on_gpu

from dist2 import ProcessGroup

NUMEL = 1 << 20


def collectives(pg: ProcessGroup) -> None:
    size, me = pg.size(), pg.rank()
    total = float(sum(range(1, size + 1)))
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            tensor = late(me + 1.0)
            pg.all_reduce(tensor)
            assert tensor.sum().item() == total * NUMEL
            work = pg.all_reduce(tensor.fill_(me + 1.0), async_op=True)
            work.wait()
            assert tensor.sum().item() == total * NUMEL
            parts = [torch.empty(NUMEL, device="cuda") for _ in range(size)]
            pg.all_gather(parts, late(me + 1.0))
            assert [part[-1].item() for part in parts] == [rank + 1.0 for rank in range(size)]
            whole = torch.empty(size, NUMEL, device="cuda")
            pg.all_gather_single(whole, late(me + 1.0))
            assert whole[:, 0].tolist() == [rank + 1.0 for rank in range(size)]
            mine = torch.empty(NUMEL, device="cuda")
            pg.reduce_scatter_single(mine, late(me + 1.0, size * NUMEL))
            assert mine.sum().item() == total * NUMEL
            columns = torch.full((64, 64), float(me), device="cuda").t()[::2]
            pg.broadcast(columns, size - 1)
            assert columns.eq(size - 1.0).all()


def messages(pg: ProcessGroup) -> None:
    size, me = pg.size(), pg.rank()
    right, left = (me + 1) % size, (me - 1) % size
    for tag in (0, 3):
        got = torch.empty(NUMEL, device="cuda")
        sending, receiving = pg.isend(late(float(me)), right, tag), pg.irecv(got, left, tag)
        receiving.wait()
        sending.wait()
        assert got[-1].item() == left
    got = torch.empty(NUMEL, device="cuda")
    if me == 0:
        pg.send(late(5.0), 1)
    elif me == 1:
        pg.recv(got, 0)
        assert got.sum().item() == 5.0 * NUMEL


@pytest.mark.parametrize("body", [collectives, messages])
def test_gpu_tensors_through_the_host(body: object, tmp_path: Path) -> None:
    run_on_gpu(2, body, tmp_path, backend="socket", device="cpu")  # type: ignore[arg-type]  # one of the two above
