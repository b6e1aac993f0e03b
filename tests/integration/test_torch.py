"""torch's own distributed code on a dist2 group, unmodified: two processes, each backend."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import nccl_stubs
from support.processes import Crew
from support.training import WORLD, alone, batch, close, mesh_of, model, quiet, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh

from dist2 import GroupAbortedError, InvalidUsageError, MismatchError, PeerLostError, ProcessGroup
from dist2.group.open_groups import open_groups
from dist2.torch_backend import default_group

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=["socket", "nccl"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a callable that calls ``body(pg, *arguments)`` on two ranks, in processes that are kept.

    NCCL runs on host memory: see ``support/host_device.py``.
    """
    if request.param == "nccl" and nccl_stubs.missing():
        pytest.skip(str(nccl_stubs.missing()))
    crew = Crew(WORLD, tmp_path_factory.mktemp("crew"))
    yield functools.partial(crew.run, timeout=15.0, backend=request.param)
    crew.close()


# DistributedDataParallel


def _ddp(pg: ProcessGroup) -> None:
    with quiet():
        net = nn.parallel.DistributedDataParallel(model(), process_group=pg, bucket_cap_mb=1)
        train(net, pg.rank())
    mine = [parameter.detach() for parameter in net.parameters()]
    close(mine, alone())
    for parameter in mine:
        theirs = [torch.empty_like(parameter) for _ in range(WORLD)]
        pg.all_gather(theirs, parameter)
        assert torch.equal(theirs[0], theirs[1])


def test_ddp_trains_as_one_process_does(run: Run) -> None:
    run(_ddp)


def _ddp_hook(pg: ProcessGroup) -> None:
    def average(group: ProcessGroup, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations
        work = group.allreduce(bucket.buffer().div_(WORLD))
        return work.get_future().then(lambda done: done.value()[0])

    with quiet():
        net = nn.parallel.DistributedDataParallel(model(), process_group=pg)
        net.register_comm_hook(pg, average)
        train(net, pg.rank())
    close([parameter.detach() for parameter in net.parameters()], alone())


def test_a_communication_hook_of_ddp(run: Run) -> None:
    run(_ddp_hook)


def _ddp_power_sgd(pg: ProcessGroup) -> None:
    """Its callbacks wait for operations of the group that calls them."""
    state = powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=2, start_powerSGD_iter=2)
    with quiet():
        net = nn.parallel.DistributedDataParallel(model(), process_group=pg)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(net, pg.rank())
        train(net, pg.rank())
    for parameter in net.parameters():
        theirs = [torch.empty_like(parameter) for _ in range(WORLD)]
        pg.all_gather(theirs, parameter.detach())
        assert torch.equal(theirs[0], theirs[1])


def test_a_hook_of_ddp_that_waits_within_its_callbacks(run: Run) -> None:
    run(_ddp_power_sgd)


def _ddp_uneven(pg: ProcessGroup) -> int:
    with quiet(pg):
        net = nn.parallel.DistributedDataParallel(model(), process_group=pg)
        steps = 0
        with net.join():
            for step in range(2 + pg.rank()):
                net(batch(pg.rank(), step)[0]).sum().backward()
                steps += 1
        return steps


def test_ddp_joins_ranks_with_uneven_inputs(run: Run) -> None:
    assert run(_ddp_uneven) == [2, 3]


def _ddp_uneven_mean(pg: ProcessGroup) -> float:
    """Gradients are divided by how many ranks still have inputs: C++ keeps the Work that counted them."""
    with quiet(pg):
        net = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=pg)
        with net.join(divide_by_initial_world_size=False):
            for step in range(1 + pg.rank()):
                net.zero_grad()
                outputs = net(torch.full((1, 1), float(10 * step + pg.rank() + 1)))
                gc.collect()
                outputs.sum().backward()
        [weight] = net.parameters()
        assert weight.grad is not None
        return weight.grad.item()


def test_ddp_joins_and_divides_by_those_that_take_part(run: Run) -> None:
    first, second = run(_ddp_uneven_mean)
    assert first == (1 + 2) / 2
    assert second == 12


def _ddp_abort(pg: ProcessGroup) -> str:
    """A failed reduction reaches the caller of backward as a Python error, and ends no process."""
    with quiet():
        net = nn.parallel.DistributedDataParallel(model(), process_group=pg)
        if pg.rank() == 1:
            pg.abort()
            return "left"
        x, y = batch(0, 0)
        try:
            nn.functional.mse_loss(net(x), y).backward()
        except RuntimeError as error:
            assert isinstance(pg.get_error(), (PeerLostError, GroupAbortedError)), repr(error)
            return str(error)
    return "no error"


def test_a_lost_peer_in_backward_is_an_error(run: Run) -> None:
    said, left = run(_ddp_abort)
    assert left == "left"
    assert "rank 1" in said


# Fully sharded data parallel


def _fsdp2(pg: ProcessGroup) -> None:
    from torch.distributed.fsdp import fully_shard

    with quiet(pg):
        mesh = mesh_of(pg)
        net: Any = model()  # whose parameters become sharded tensors
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        train(net, pg.rank())
        whole = [parameter.full_tensor().detach() for parameter in net.parameters()]
    close(whole, alone())


def test_fsdp2_trains_as_one_process_does(run: Run) -> None:
    run(_fsdp2)


def _fsdp2_clip(pg: ProcessGroup) -> float:
    from torch.distributed.fsdp import fully_shard

    with quiet(pg):
        net: Any = fully_shard(model(), mesh=mesh_of(pg))
        x, y = batch(pg.rank(), 0)
        nn.functional.mse_loss(net(x), y).backward()
        norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        return float(norm.full_tensor())


def test_fsdp2_clips_gradients_by_their_global_norm(run: Run) -> None:
    net = model()
    pairs = [batch(rank, 0) for rank in range(WORLD)]
    x, y = (torch.cat(column) for column in zip(*pairs, strict=True))
    nn.functional.mse_loss(net(x), y).backward()
    expected = float(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
    assert run(_fsdp2_clip) == pytest.approx([expected] * WORLD)


# DTensor and functional collectives


def _dtensor(pg: ProcessGroup) -> None:
    from torch.distributed.tensor import DTensor as Tensor
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    with quiet(pg):
        mesh = mesh_of(pg)
        whole = torch.arange(35.0).view(7, 5)  # uneven shards
        rows = distribute_tensor(whole.clone(), mesh, [Shard(0)])
        assert rows.to_local().shape[0] == (4, 3)[pg.rank()]
        assert torch.equal(rows.full_tensor(), whole)
        columns = rows.redistribute(mesh, [Shard(1)])
        assert columns.to_local().shape == (7, (3, 2)[pg.rank()])
        assert torch.equal(columns.full_tensor(), whole)
        assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
        partial = Tensor.from_local(torch.ones(4, 2), mesh, [Partial()])
        assert torch.equal(partial.full_tensor(), torch.full((4, 2), 2.0))
        assert torch.equal(partial.redistribute(mesh, [Shard(0)]).to_local(), torch.full((2, 2), 2.0))
        product: Any = rows @ distribute_tensor(torch.eye(5), mesh, [Replicate()])
        assert torch.equal(product.full_tensor(), whole)


def test_dtensor_redistributes(run: Run) -> None:
    run(_dtensor)


def _tensor_parallel(pg: ProcessGroup) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with quiet(pg):
        x, y = batch(0, 0)
        plain, net = model(), model()
        parallelize_module(net, mesh_of(pg), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for each in (plain, net):
            nn.functional.mse_loss(each(x), y).backward()
        for one, other in zip(plain.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad.full_tensor())


def test_tensor_parallel_layers(run: Run) -> None:
    run(_tensor_parallel)


def _compiled(pg: ProcessGroup) -> None:
    import torch.distributed._functional_collectives as funcol

    name = pg.group_name

    def step(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", name) + 1

    with quiet():
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(torch.full((3,), float(pg.rank() + 1))), torch.full((3,), 7.0))


def test_compiled_functional_collectives(run: Run) -> None:
    run(_compiled)


# Distributed checkpoint


def _checkpoint(pg: ProcessGroup, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    with quiet(pg):
        mesh = mesh_of(pg)
        whole = torch.arange(20.0).view(10, 2)
        state = {"sharded": distribute_tensor(whole.clone(), mesh, [Shard(0)]), "step": torch.tensor(5)}
        dcp.save(state, checkpoint_id=folder, process_group=pg)
        back: dict[str, Any] = {
            "sharded": distribute_tensor(torch.zeros(10, 2), mesh, [Shard(1)]),
            "step": torch.tensor(0),
        }
        dcp.load(back, checkpoint_id=folder, process_group=pg)
        assert torch.equal(back["sharded"].full_tensor(), whole)
        assert back["step"].item() == 5


def test_a_checkpoint_is_saved_and_loaded_resharded(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run(_checkpoint, str(folder))
    assert (folder / ".metadata").exists()


# torch's tables


def _adopted(pg: ProcessGroup) -> None:
    import torch.distributed as dist

    assert not dist.is_initialized()
    with quiet(pg):
        assert dist.get_rank() == pg.rank()
        assert dist.get_world_size() == dist.get_world_size(pg) == WORLD
        total = torch.ones(2)
        dist.all_reduce(total)
        dist.all_reduce(total, group=pg)
        assert torch.equal(total, torch.full((2,), 4.0))
        said: list[Any] = [None] * WORLD
        dist.all_gather_object(said, {"rank": pg.rank()})
        assert said == [{"rank": 0}, {"rank": 1}]
        with pytest.raises(InvalidUsageError, match="has a default group already"), default_group(pg):
            pass
    assert not dist.is_initialized()
    pg.barrier()


def _called_from(pg: ProcessGroup) -> list[tuple[str, int]]:
    import torch.distributed as dist

    pair = pg.split([0, 1])
    assert pair is not None
    with quiet(pair), pytest.raises(MismatchError) as caught:
        dist.all_reduce(torch.ones(3 + pg.rank()))
    pair.abort()
    return [(call.file, call.line) for call in caught.value.calls.values()]


def test_errors_name_the_line_that_called_torch(run: Run) -> None:
    first = _called_from.__code__.co_firstlineno
    for said in run(_called_from):
        assert said == [(__file__, first + 6)] * 2


def _mesh_of_two_dimensions(pg: ProcessGroup) -> None:
    import torch.distributed as dist

    before = len(open_groups())
    with quiet(pg):
        mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("outer", "inner"))
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh["inner"].get_group())
        assert total.item() == WORLD
        assert dist.get_backend(dist.new_group([0, 1])) == "dist2"
        assert len(open_groups()) > before
    assert len(open_groups()) == before, "groups that torch made were not closed"
    pg.barrier()


def test_groups_that_torch_makes_beside_its_default_group(run: Run) -> None:
    run(_mesh_of_two_dimensions)


def _default_groups_one_after_another(pg: ProcessGroup) -> None:
    """torch caches data of the first mesh, and finds the second's group by it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = set()
    for _ in range(3):
        pair = pg.split([0, 1])
        assert pair is not None
        own = pair.group_name
        with quiet(pair):
            names.add(pair.group_name)
            sharded: Any = fully_shard(model(), mesh=mesh_of(pair))
            train(sharded, pg.rank())
            whole = [parameter.full_tensor().detach() for parameter in sharded.parameters()]
            parallel = model()
            parallelize_module(parallel, mesh_of(pair), {"0": ColwiseParallel(), "2": RowwiseParallel()})
            parallel(batch(0, 0)[0]).sum().backward()
            rows = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("outer", "inner"))
            names.add(rows["outer"].get_group().group_name)
        close(whole, alone())
        assert pair.group_name == own
        pair.shutdown()
    assert len(names) == 2, names


def test_default_groups_one_after_another(run: Run) -> None:
    run(_default_groups_one_after_another)


def test_a_group_as_torchs_default_group(run: Run) -> None:
    run(_adopted)
