"""Parts of torch that look up its default group, as a program uses them after the changed import line.

None of them is given a group. Each function is one part; `run_all` calls them as a rank of two.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from support.torch_features import has
from support.training import STEPS, WORLD, alone, batch, close, model, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dist2.legacy as dist
from dist2.group.open_groups import open_groups


def ddp(folder: Path) -> None:
    net = DistributedDataParallel(model())
    train(net, dist.get_rank())
    close([each.detach() for each in net.parameters()], alone())


def sampler(folder: Path) -> None:
    from torch.utils.data import DistributedSampler

    items: Any = list(range(8))
    mine: list[int] = list(DistributedSampler(items, shuffle=False))
    assert mine == list(range(dist.get_rank(), 8, WORLD))


def mesh(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rows = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("outer", "inner"))
    inner = rows["inner"].get_group()
    assert dist.get_process_group_ranks(inner) == list(range(WORLD))
    dist.all_reduce(total := torch.ones(1), group=inner)
    assert total.item() == WORLD
    pair = dist.new_group([1, 0], sort_ranks=False)
    assert torch.distributed.get_process_group_ranks(pair) == [1, 0]
    message = torch.tensor([float(dist.get_rank())])
    torch.distributed.broadcast(message, src=1, group=pair)
    assert message.item() == 1


def ddp_on_a_mesh(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    net = DistributedDataParallel(model(), device_mesh=init_device_mesh("cpu", (WORLD,)))
    train(net, dist.get_rank())
    close([each.detach() for each in net.parameters()], alone())


def fsdp2(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    net: Any = model()
    fully_shard(net[0])
    fully_shard(net)
    train(net, dist.get_rank())
    norm: Any = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
    assert norm.full_tensor().item() > 0
    close([each.full_tensor().detach() for each in net.parameters()], alone())


def fsdp1(folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(net, dist.get_rank())
    with FullyShardedDataParallel.summon_full_params(net):
        close([each.detach() for each in net.parameters()], alone())


def fsdp1_shards(folder: Path) -> None:
    """Rank 1 has no part of the parameter: torch asks the group then where tensors are."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    net = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
        state = net.state_dict()
        assert state["weight"].device == torch.device("cpu")
        assert len(state["weight"].local_shards()) == 1 - dist.get_rank()
        net.load_state_dict(state)


def dtensor(folder: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    whole = torch.arange(12.0).reshape(4, 3)
    sharded: Any = distribute_tensor(whole, init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    assert sharded.to_local().shape == (4 // WORLD, 3)
    assert torch.equal((sharded @ sharded.T).full_tensor(), whole @ whole.T)
    assert torch.equal(sharded.sum().redistribute(placements=[Replicate()]).to_local(), whole.sum())


def tensor_parallel(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net, plain = model(), model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (WORLD,)), plan)
    inputs = batch(0, 0)[0]
    close([net(inputs)], [plain(inputs)])


def pipeline(folder: Path) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, net = dist.get_rank(), model()
    part = (net[:2], net[2:])[rank]
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    if not has("pipelines"):
        stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]  # no first messages
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    inputs, targets = batch(0, 0)
    if rank == 0:
        schedule.step(inputs)
    else:
        losses: list[torch.Tensor] = []
        out = schedule.step(target=targets, losses=losses)
        whole = model()
        close([out], [whole(inputs)])
        assert len(losses) == 2
    expected = model()
    nn.functional.mse_loss(expected(inputs), targets).backward()
    close(
        [each.grad for each in part.parameters()],
        [each.grad for each in (expected[:2], expected[2:])[rank].parameters()],
    )


def checkpoint(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    net: Any = fully_shard(model())
    saved = {name: value.full_tensor().clone() for name, value in net.state_dict().items()}
    dcp.save(net.state_dict(), checkpoint_id=str(folder / "at-once"))
    ended = dcp.async_save(net.state_dict(), checkpoint_id=str(folder / "meanwhile"))
    ended.result()
    dist.barrier()
    for name in ("at-once", "meanwhile"):
        other: Any = fully_shard(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)))
        state = other.state_dict()
        for value in state.values():
            value.zero_()
        dcp.load(state, checkpoint_id=str(folder / name))
        for key, value in state.items():
            assert torch.equal(value.full_tensor(), saved[key]), (name, key)


def zero(folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        inputs, targets = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    close([each.detach() for each in net.parameters()], alone())
    optimizer.consolidate_state_dict(to=0)


def join(folder: Path) -> None:
    from torch.distributed.algorithms.join import Join

    net = DistributedDataParallel(model())
    steps = 0
    with Join([net]):
        for step in range(1 + dist.get_rank()):
            net(batch(0, step)[0]).sum().backward()
            steps += 1
    assert steps == 1 + dist.get_rank()


def objects(folder: Path) -> None:
    """torch's own functions and those of dist2, on one default group."""
    torch.distributed.all_reduce(total := torch.ones(2))
    assert total.tolist() == [WORLD] * 2
    said: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(said, {"rank": dist.get_rank()})
    assert said == [{"rank": rank} for rank in range(WORLD)]
    assert torch.distributed.group.WORLD is dist.group.WORLD


def shrunk(folder: Path) -> None:
    if dist.get_rank() == 0:
        smaller = dist.shrink_group([1])
        assert torch.distributed.group.WORLD is smaller
        assert torch.distributed.get_world_size() == 1


PARTS = (
    ddp,
    sampler,
    mesh,
    ddp_on_a_mesh,
    fsdp2,
    fsdp1,
    fsdp1_shards,
    dtensor,
    tensor_parallel,
    pipeline,
    checkpoint,
    zero,
    join,
    objects,
    shrunk,
)


def run_all(rank: int, folder: Path) -> list[str]:
    """Run every part as a rank of two; return the names of those that ran."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\.")
    dist.init_process_group(init_method=f"file://{folder}/store?rank={rank}&world_size={WORLD}")
    ran = []
    for part in PARTS:
        part(folder)
        ran.append(part.__name__)
    dist.destroy_process_group()
    assert not torch.distributed.is_initialized()
    assert not open_groups(), "groups that torch made were not closed"
    return ran
