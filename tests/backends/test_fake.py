"""The backend without peers."""

from __future__ import annotations

import pytest
import torch

import dist2
from dist2 import HashStore, ProcessGroup


def fake_group(rank: int = 1, world_size: int = 3) -> ProcessGroup:
    return dist2.new_group("fake", 5, rank=rank, world_size=world_size)


def test_reductions_leave_their_tensor() -> None:
    with fake_group() as pg:
        for run in (pg.all_reduce, pg.broadcast, pg.reduce):
            tensor = torch.arange(3.0)
            assert run(tensor).is_completed()
            assert tensor.tolist() == [0, 1, 2]


def test_gathering_copies_the_input_to_every_output() -> None:
    with fake_group() as pg:
        outputs = [torch.zeros(2, 2).t() for _ in range(3)]
        pg.all_gather(outputs, torch.arange(4.0).view(2, 2))
        assert all(output.tolist() == [[0, 1], [2, 3]] for output in outputs)
        whole = torch.zeros(6)
        pg.all_gather_single(whole, torch.tensor([1.0, 2.0]))
        assert whole.tolist() == [1, 2] * 3
        uneven = [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
        pg.all_gather_v(uneven, torch.tensor([7.0, 8.0]))
        assert [output.tolist() for output in uneven] == [[7], [7, 8], [7, 8, 0]]
        at_root = [torch.zeros(1) for _ in range(3)]
        pg.gather(at_root, torch.ones(1), root=1)
        assert [output.item() for output in at_root] == [1, 1, 1]


def test_scattering_keeps_this_ranks_part() -> None:
    with fake_group(rank=1) as pg:
        parts = [torch.full((2,), float(rank)) for rank in range(3)]
        output = torch.zeros(2)
        pg.reduce_scatter(output, parts)
        assert output.tolist() == [1, 1]
        pg.reduce_scatter_single(output, torch.arange(6.0))
        assert output.tolist() == [2, 3]
        pg.scatter(output, parts, root=1)
        assert output.tolist() == [1, 1]
        pg.scatter(output, None, root=0)
        assert output.tolist() == [1, 1]


def test_exchanges_pair_inputs_with_outputs() -> None:
    with fake_group() as pg:
        outputs = [torch.zeros(rank + 1) for rank in range(3)]
        pg.all_to_all(outputs, [torch.full((2,), float(rank)) for rank in range(3)])
        assert [output.tolist() for output in outputs] == [[0], [1, 1], [2, 2, 0]]
        whole = torch.zeros(6)
        pg.all_to_all_single(whole, torch.arange(6.0))
        assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_messages_complete_at_once() -> None:
    with fake_group(rank=1) as pg:
        pg.send(torch.ones(2), 2)
        got = torch.full((2,), 5.0)
        assert pg.recv(got, 0).source_rank() == 0
        assert pg.recv(got).source_rank() == 1
        assert got.tolist() == [5, 5]
        pg.barrier()


def test_shapes_alone_are_enough() -> None:
    with fake_group(world_size=1024, rank=0) as pg:
        whole = torch.empty(1024, 4096, device="meta")
        pg.all_gather_single(whole, torch.empty(4096, device="meta"))
        pg.all_reduce(whole)
        part = pg.split(list(range(8)))
        assert part is not None
        assert part.size() == 8
        part.shutdown()


def test_nobody_is_waited_for() -> None:
    """A process can be any rank of any world, with a store or without."""
    with dist2.new_group("fake", 0.5, store=HashStore(), rank=999, world_size=1000) as pg:
        assert (pg.rank(), pg.size()) == (999, 1000)
        part = pg.split([998, 999])
        assert part is not None
        assert part.global_rank() == 999
        part.shutdown()
        pg.monitored_barrier()
        with pytest.raises(dist2.InvalidUsageError, match="timeout"):
            pg.monitored_barrier(timeout=-1)
    with pytest.raises(dist2.GroupAbortedError):
        pg.monitored_barrier()


def test_arguments_are_checked_as_everywhere() -> None:
    with fake_group() as pg, pytest.raises(dist2.InvalidUsageError, match="between 0 and 2"):
        pg.broadcast(torch.ones(1), root=3)


def test_unknown_option_is_named() -> None:
    with pytest.raises(dist2.UnknownOptionError, match="'speed'"):
        dist2.new_group("fake", store=HashStore(), rank=0, world_size=1, speed=3)  # type: ignore[call-overload]
