"""A program written for torch.distributed: one import changed, the rest as it was.

torchrun --nproc-per-node=2 examples/legacy_drop_in.py
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

import dist2.legacy as dist  # was: import torch.distributed as dist


def train(rank: int) -> float:
    """Fit y = 2x - 1 on data divided between the ranks; return the error of the weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))  # on torch's default group, which is dist2's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    inputs = torch.linspace(-1, 1, 64).view(-1, 1)[rank :: dist.get_world_size()]
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), 2 * inputs - 1)
        loss.backward()
        optimizer.step()
    weight, bias = model.module.weight.item(), model.module.bias.item()
    return float(max(abs(weight - 2), abs(bias + 1)))


def main() -> None:
    """Run collectives, messages, objects, subgroups and DDP; check the result of each."""
    dist.init_process_group()  # rank, size and address come from torchrun; the backend is "socket"
    rank, size = dist.get_rank(), dist.get_world_size()

    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    assert total.tolist() == [size * (size + 1) / 2] * 3

    work = dist.broadcast(told := torch.tensor([rank]), src=size - 1, async_op=True)
    assert work is not None  # None is for ranks outside of the group
    work.wait()
    assert told.item() == size - 1

    got = torch.empty(2)
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    assert got.tolist() == [(rank - 1) % size] * 2

    names: list[str | None] = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    assert names == [f"rank {each}" for each in range(size)]

    evens = dist.new_group(list(range(0, size, 2)))
    if rank % 2 == 0:
        count = torch.ones(1)
        dist.all_reduce(count, group=evens)
        assert count.item() == dist.get_world_size(evens)

    error = train(rank)
    assert error < 0.01, error
    if rank == 0:
        backend = dist.get_backend()
        print(f"ok: {size} ranks, backend {backend!r}: collectives, messages, objects, subgroups, DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
