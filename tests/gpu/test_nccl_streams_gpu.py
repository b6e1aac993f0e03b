"""Streams, graphs, lifetimes and futures on a GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_ranks import late, run_on_gpu

from dist2 import ProcessGroup


def order(pg: ProcessGroup) -> None:
    expected = float(sum(range(1, pg.size() + 1)))
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            tensor = late(pg.rank() + 1.0)
            pg.all_reduce(tensor)
            assert tensor.sum().item() == expected * tensor.numel()
            tensor = late(pg.rank() + 1.0)
            work = pg.all_reduce(tensor, async_op=True)
            work.wait()
            assert tensor.sum().item() == expected * tensor.numel()
            assert work.is_completed() and work.is_success()


def lifetime(pg: ProcessGroup) -> None:
    for _ in range(10):
        whole = torch.empty(pg.size() << 20, device="cuda")
        work = pg.all_gather_single(whole, late(pg.rank() + 1.0), async_op=True)
        gc.collect()
        taken = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]
        work.wait()
        assert whole.view(pg.size(), -1)[:, -1].tolist() == [rank + 1.0 for rank in range(pg.size())]
        del taken


def futures(pg: ProcessGroup) -> None:
    tensor = late(1.0)
    future = pg.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait()[0].item() == 2.0 * pg.size()
    work = pg.all_reduce(tensor, async_op=True)
    work.wait(30)
    assert work._get_duration() > 0


def capture(pg: ProcessGroup) -> None:
    tensor = torch.ones(1000, device="cuda")
    pg.all_reduce(tensor)  # connects, which cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pg.all_reduce(tensor)
        work = pg.all_reduce(tensor, async_op=True)
        work.wait()
    tensor.fill_(1.0)
    for replays in (1, 2, 3):
        graph.replay()
        assert tensor[0].item() == float(pg.size()) ** (2 * replays)


def groups_on_one_device(pg: ProcessGroup) -> None:
    parts = [pg.split(range(pg.size())) for _ in range(2)]
    tensors = [late(1.0 + n) for n in range(2)]
    works = [part.all_reduce(each, async_op=True) for part, each in zip(parts, tensors, strict=True) if part]
    for work in works:
        work.wait()
    assert [each[0].item() for each in tensors] == [pg.size() * 1.0, pg.size() * 2.0]
    for part in parts:
        if part is not None:
            part.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("body", [order, lifetime, futures, capture, groups_on_one_device])
def test_streams(body: Any, world_size: int, tmp_path: Path) -> None:
    run_on_gpu(world_size, body, tmp_path, timing=True)


@pytest.mark.parametrize("option", [{"blocking": True}, {"strict": True}, {"eager": False}], ids=str)
def test_options(option: dict[str, Any], tmp_path: Path) -> None:
    run_on_gpu(2, order, tmp_path, **option)
