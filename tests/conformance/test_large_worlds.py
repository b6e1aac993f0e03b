"""More ranks than a machine has cores, as threads.

Each has a node, which reserves 40 GiB of address space and uses a few pages of it.
"""

from __future__ import annotations

import pytest
import torch
from support.oracle import example, reduced
from support.ranks import TENANTS, Tenant, run_ranks
from torch.distributed import ReduceOp

from dist2 import ProcessGroup
from dist2.operation.kinds import Reduction

SOME = [tenant for tenant in TENANTS if tenant.name in ("inproc", "shm")]


@pytest.mark.parametrize("tenant", SOME, ids=str)
@pytest.mark.parametrize("world_size", [5, 8, 16])
def test_a_few_collectives(tenant: Tenant, world_size: int) -> None:
    _run_a_few_collectives(tenant, world_size)


def test_more_ranks_on_a_host_than_a_fold_in_c_has_room_for_on_its_stack() -> None:
    (shm,) = [tenant for tenant in SOME if tenant.name == "shm"]
    _run_a_few_collectives(shm, 67)


def _run_a_few_collectives(tenant: Tenant, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        me = pg.rank()
        for numel in (1, 1000):
            everyone = [example((numel,), torch.float32, rank) for rank in range(world_size)]
            expected = reduced(everyone, Reduction.of(ReduceOp.SUM))
            mine = everyone[me].clone()
            pg.all_reduce(mine)
            assert torch.equal(mine, expected)
            mine = everyone[me].clone()
            pg.broadcast(mine, world_size - 1)
            assert torch.equal(mine, everyone[-1])
            whole = torch.empty(world_size, numel)
            pg.all_gather_single(whole, everyone[me])
            assert torch.equal(whole, torch.stack(everyone))
            part = torch.empty(numel)
            pg.reduce_scatter_single(part, whole)
            assert torch.equal(part, reduced([whole[me]] * world_size, Reduction.of(ReduceOp.SUM)))
            swapped = torch.empty(world_size)
            pg.all_to_all_single(swapped, torch.arange(float(world_size)) + 100 * me)
            assert torch.equal(swapped, torch.arange(float(world_size)) * 100 + me)
        pg.barrier()

    run_ranks(world_size, body, tenant, timeout=40.0)
