"""torch's own programs on a GPU: the legacy API, functional collectives, DTensor, compilation, profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_ranks import run_on_gpu
from torch.distributed import _functional_collectives as functional

import dist2.torch_backend
from dist2 import PrefixStore, ProcessGroup
from dist2 import legacy as dist
from observability import dump_flight_recorder


def legacy(pg: ProcessGroup) -> None:
    for round_, backend in enumerate(("nccl", "cpu:socket,cuda:nccl")):
        store = PrefixStore(f"legacy{round_}", pg.spec.store)
        dist.init_process_group(
            backend, store=store, rank=pg.rank(), world_size=pg.size(), device_id=torch.device("cuda:0")
        )
        size, me = dist.get_world_size(), dist.get_rank()
        tensor = torch.full((1000,), me + 1.0, device="cuda")
        dist.all_reduce(tensor)
        assert tensor[0].item() == sum(range(1, size + 1))
        whole = torch.empty(size * 1000, device="cuda")
        dist.all_gather_into_tensor(whole, torch.full((1000,), float(me), device="cuda"))
        assert whole[::1000].tolist() == [float(rank) for rank in range(size)]
        got, peer = torch.empty(4, device="cuda"), (me + 1) % size
        exchange = [
            dist.P2POp(dist.isend, torch.full((4,), float(me), device="cuda"), peer),
            dist.P2POp(dist.irecv, got, (me - 1) % size),
        ]
        for each in dist.batch_isend_irecv(exchange):
            each.wait()
        assert got[0].item() == (me - 1) % size
        part = dist.new_group(list(range(size)))
        work = dist.all_reduce(tensor.fill_(1.0), group=part, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier()
        assert tensor[0].item() == size
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": me})
        assert objects == [{"rank": rank} for rank in range(size)]
        torch.distributed.all_reduce(tensor)
        assert tensor[0].item() == size * size
        dist.destroy_process_group()


def functional_calls(pg: ProcessGroup) -> None:
    with dist2.torch_backend.default_group(pg):
        tensor = torch.full((1000,), pg.rank() + 1.0, device="cuda")
        total = functional.all_reduce(tensor, "sum", pg)
        assert (total + 0)[0].item() == sum(range(1, pg.size() + 1))
        whole = functional.all_gather_tensor(tensor, 0, pg)
        assert (whole + 0)[::1000].tolist() == [rank + 1.0 for rank in range(pg.size())]
        part = functional.reduce_scatter_tensor(whole, "sum", 0, pg)
        assert (part + 0)[0].item() == (pg.rank() + 1.0) * pg.size()


def dtensors(pg: ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with dist2.torch_backend.default_group(pg):
        mesh = DeviceMesh.from_group(pg, "cuda")
        torch.manual_seed(3)
        left, right = torch.randn(64, 32, device="cuda"), torch.randn(32, 48, device="cuda")
        product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
        whole: Any = product
        torch.testing.assert_close(whole.redistribute(mesh, [Replicate()]).to_local(), left @ right)


def compiled(pg: ProcessGroup) -> None:
    with dist2.torch_backend.default_group(pg):
        name: Any = pg.group_name

        @torch.compile(fullgraph=True)
        def step(tensor: torch.Tensor) -> Any:
            return functional.all_reduce(tensor * 2, "sum", name) + 1

        result = step(torch.full((1000,), pg.rank() + 1.0, device="cuda"))
        assert result[0].item() == 2 * sum(range(1, pg.size() + 1)) + 1


def instruments(pg: ProcessGroup, path: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    pg.all_reduce(torch.ones(5, device="cuda"))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        pg.all_reduce(torch.ones(5, device="cuda"))
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    assert any("all_reduce" in name for name in names), names
    assert any("nccl" in name.lower() for name in names), names
    dumped = json.loads(dump_flight_recorder(f"{path}/dump", rank=pg.rank(), format="json").read_text())
    calls = [entry for entry in dumped["entries"] if "all_reduce" in entry["profiling_name"]]
    assert [entry["state"] for entry in calls] == ["completed"] * 2


def test_instruments(tmp_path: Path) -> None:
    run_on_gpu(2, instruments, tmp_path, str(tmp_path))


@pytest.mark.parametrize("body", [legacy, functional_calls, dtensors, compiled])
def test_programs(body: object, tmp_path: Path) -> None:
    run_on_gpu(2, body, tmp_path)  # type: ignore[arg-type]  # one of the four above
