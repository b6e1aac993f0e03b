"""The default group of the global API as torch's own: how it comes there and goes, with a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from support.threads import together
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import dist2
import dist2.legacy as ours
from dist2 import HashStore, InvalidUsageError

_gloo: Any = theirs.ProcessGroupGloo
OPTIONS = _gloo._Options()


def begin(**options: Any) -> None:
    ours.init_process_group(store=HashStore(), rank=0, world_size=1, **options)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for package in (ours, theirs):
        if package.is_initialized():
            package.destroy_process_group()
    world = distributed_c10d._world
    assert not world.pg_map
    assert not world.pg_names
    assert not world.pg_group_ranks
    assert not world.pg_backend_config
    assert not world.pg_to_tag
    assert not any(world.tags_to_pg.values())


def test_it_is_torchs_default_group_from_init_to_destroy() -> None:
    begin()
    assert theirs.group.WORLD is ours.group.WORLD
    ours.destroy_process_group()
    assert not theirs.is_initialized()
    begin()
    assert theirs.get_rank() == 0


@pytest.mark.parametrize("backend", ["socket", "gloo"])
def test_ddp_takes_a_group_of_each_backend(backend: str) -> None:
    begin(backend=backend)
    net = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    net(torch.ones(1, 2)).backward()
    assert net.module.weight.grad.tolist() == [[1, 1]]


def test_torch_may_be_left_alone() -> None:
    begin(register_with_torch=False)
    assert not theirs.is_initialized()
    theirs.init_process_group("gloo", store=theirs.HashStore(), rank=0, world_size=1)
    ours.destroy_process_group()
    assert theirs.is_initialized()


def test_torchs_own_default_group_is_not_replaced() -> None:
    theirs.init_process_group("gloo", store=theirs.HashStore(), rank=0, world_size=1)
    with pytest.raises(InvalidUsageError, match=r"default group already.*register_with_torch=False"):
        begin()
    assert not ours.is_initialized()
    theirs.all_reduce(torch.ones(1))
    begin(register_with_torch=False)


def test_groups_made_on_either_side_are_known_to_the_other() -> None:
    begin()
    mine, own = ours.new_group([0]), theirs.new_group([0])
    assert isinstance(own, dist2.ProcessGroup)
    assert theirs.get_process_group_ranks(mine) == ours.get_process_group_ranks(own) == [0]
    ours.destroy_process_group(mine)
    assert mine not in distributed_c10d._world.pg_map
    ours.destroy_process_group()
    assert own.is_closed


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_group_that_torch_made_can_be_destroyed(backend: str | None) -> None:
    begin()
    made = theirs.new_group([0], backend=backend)
    ours.destroy_process_group(made)
    assert made not in distributed_c10d._world.pg_map
    with pytest.raises(InvalidUsageError, match="process group"):
        ours.destroy_process_group(made)
    assert ours.is_initialized()


def test_options_of_a_group_that_torch_makes() -> None:
    begin()
    made = theirs.new_group([0], pg_options={"transport": "inproc"})
    assert isinstance(made, dist2.ProcessGroup)
    assert made.spec.options == {"transport": "inproc"}
    assert isinstance(theirs.new_group([0], pg_options=OPTIONS), dist2.ProcessGroup)
    with pytest.raises(InvalidUsageError, match="pg_options of backend 'dist2' must be a mapping"):
        theirs.new_group([0], pg_options=3)


def test_torch_may_destroy_it() -> None:
    begin()
    ours.new_group([0])
    theirs.destroy_process_group()
    assert not ours.is_initialized()
    for call in (ours.get_rank, ours.get_world_size, ours.barrier):
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            call()
    begin()
    theirs.destroy_process_group()
    ours.destroy_process_group()
    begin()


def test_ranks_that_are_threads_share_torchs_tables_which_hold_none() -> None:
    store = HashStore()

    def rank_main(rank: int) -> bool:
        ours.init_process_group("socket", rank=rank, world_size=2, store=store)
        ours.all_reduce(total := torch.ones(1))
        entered = theirs.is_initialized()
        ours.barrier()
        ours.destroy_process_group()
        return entered and total.item() == 2

    assert together(lambda: rank_main(0), lambda: rank_main(1)) == [False, False]
