"""Cases that run over dist2's global API and over torch's: ``case(dist, rank)`` returns its results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed import ReduceOp

SIZE = 4
Case = Callable[[Any, int], Any]
CASES: list[Case] = []


def case(function: Case) -> Case:
    """Add a case to the table."""
    CASES.append(function)
    return function


def mine(rank: int, numel: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(numel) + 10 * rank).to(dtype)


@case
def broadcast(dist: Any, rank: int) -> Any:
    tensors = [mine(rank, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.complex64)]
    for src, tensor in enumerate(tensors):
        assert dist.broadcast(tensor, src) is None
    by_group_rank = mine(rank)
    dist.broadcast(by_group_rank, group_src=3)
    work = dist.broadcast(extra := mine(rank), src=1, async_op=True)
    work.wait()
    return [*tensors, by_group_rank, extra]


@case
def all_reduce(dist: Any, rank: int) -> Any:
    results = []
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
        tensor = mine(rank) / 8
        assert dist.all_reduce(tensor, op) is None
        results.append(tensor)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        tensor = mine(rank, dtype=torch.int32)
        dist.all_reduce(tensor, op=op)
        results.append(tensor)
    work = dist.all_reduce(tensor := mine(rank, dtype=torch.complex64), async_op=True)
    assert work.wait()
    assert work.is_completed()
    return [*results, tensor]


@case
def reduce(dist: Any, rank: int) -> Any:
    tensor = mine(rank)
    dist.reduce(tensor, dst=2, op=ReduceOp.MAX)
    return tensor if rank == 2 else None  # torch leaves partial results elsewhere


@case
def all_gather(dist: Any, rank: int) -> Any:
    outputs = [torch.empty(5) for _ in range(SIZE)]
    dist.all_gather(outputs, mine(rank))
    late = [torch.empty(2, 3) for _ in range(SIZE)]
    dist.all_gather(late, mine(rank, 6).view(2, 3), async_op=True).wait()
    return [outputs, late]


@case
def all_gather_single(dist: Any, rank: int) -> Any:
    joined, rows = torch.empty(SIZE * 5), torch.empty(SIZE * 2, 3)
    dist.all_gather_single(joined, mine(rank))
    dist.all_gather_single(rows, mine(rank, 6).view(2, 3), async_op=True).wait()
    return [joined, rows]


@case
def deprecated_spellings(dist: Any, rank: int) -> Any:
    joined, part, other = torch.empty(SIZE * 2), torch.empty(2), torch.empty(2)
    both = [mine(rank), mine(rank) + 1]
    rows = [[torch.empty(2), torch.empty(3)] for _ in range(SIZE)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dist.all_gather_into_tensor(joined, mine(rank, 2))
        dist._all_gather_base(joined, mine(rank, 2))
        dist.reduce_scatter_tensor(part, mine(rank, SIZE * 2))
        dist._reduce_scatter_base(other, mine(rank, SIZE * 2))
        dist.all_reduce_coalesced(both)
        dist.all_gather_coalesced(rows, [mine(rank, 2), mine(rank, 3)])
        assert dist.reduce_op.SUM == ReduceOp.SUM
    assert {each.category for each in said} == {FutureWarning}
    before_torch_2_15 = dist is torch.distributed and len(said) == 7  # it warned of two aliases too
    assert len(said) == 5 or before_torch_2_15
    return [joined, part, other, both, rows]


@case
def gather(dist: Any, rank: int) -> Any:
    outputs = [torch.empty(5) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(mine(rank), outputs, dst=1)
    at_zero = [torch.empty(5) for _ in range(SIZE)] if rank == 0 else None
    dist.gather(mine(rank), at_zero)
    return [outputs, at_zero]


@case
def scatter(dist: Any, rank: int) -> Any:
    output = torch.empty(2)
    dist.scatter(output, [mine(each, 2) for each in range(SIZE)] if rank == 3 else None, src=3)
    other = torch.empty(2)
    dist.scatter(other, [mine(each, 2) for each in range(SIZE)] if rank == 0 else [])
    return [output, other]


@case
def reduce_scatter(dist: Any, rank: int) -> Any:
    output, single = torch.empty(3), torch.empty(3)
    dist.reduce_scatter(output, [mine(rank + each, 3) for each in range(SIZE)])
    dist.reduce_scatter_single(single, mine(rank, 3 * SIZE), op=ReduceOp.MAX)
    return [output, single]


@case
def all_to_all_single(dist: Any, rank: int) -> Any:
    even = torch.empty(SIZE)
    dist.all_to_all_single(even, mine(rank, SIZE))
    sent = [each + 1 for each in range(SIZE)]
    uneven = torch.empty((rank + 1) * SIZE)
    dist.all_to_all_single(uneven, mine(rank, sum(sent)), [rank + 1] * SIZE, sent)
    return [even, uneven]


@case
def all_to_all(dist: Any, rank: int) -> Any:
    outputs = [torch.empty(3) for _ in range(SIZE)]
    dist.all_to_all(outputs, list(mine(rank, 3 * SIZE).view(SIZE, 3)))
    return outputs


@case
def barrier(dist: Any, rank: int) -> Any:
    assert dist.barrier() is None
    assert dist.barrier(async_op=True).wait()
    dist.monitored_barrier()


@case
def send_and_receive(dist: Any, rank: int) -> Any:
    got, other = torch.empty(5), torch.empty(2, dtype=torch.int64)
    peer = rank ^ 1
    if rank < peer:
        dist.send(mine(rank), peer, tag=3)
        source = dist.recv(got, peer)
    else:
        source = dist.recv(got, peer, tag=3)
        dist.send(mine(rank), peer)
    works = [
        dist.isend(mine(rank, 2, torch.int64), (rank + 1) % SIZE),
        dist.irecv(other, (rank - 1) % SIZE),
    ]
    for work in works:
        work.wait()
    return [got, source, other]


@case
def receive_from_any(dist: Any, rank: int) -> Any:
    if rank != 0:
        dist.send(mine(rank), 0)
        return None
    found = {}
    for _ in range(SIZE - 1):
        got = torch.empty(5)
        found[dist.recv(got)] = got
    return sorted(found.items())


@case
def batch(dist: Any, rank: int) -> Any:
    got = torch.empty(5)
    ops = [
        dist.P2POp(dist.isend, mine(rank), (rank + 1) % SIZE),
        dist.P2POp(dist.irecv, got, group_peer=(rank - 1) % SIZE),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [got, [op.peer for op in ops]]


@case
def objects(dist: Any, rank: int) -> Any:
    thing = {"rank": rank, "text": "x" * 10 * rank, "tensor": mine(rank)}
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, thing)
    at_two = [None] * SIZE if rank == 2 else None
    dist.gather_object(thing, at_two, dst=2)
    told = ["a", [1, 2], None] if rank == 1 else [None] * 3
    dist.broadcast_object_list(told, src=1)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [{"to": each} for each in range(SIZE)] if rank == 3 else None, src=3)
    sent = [("from", rank), 7]
    if rank == 0:
        dist.send_object_list(sent, dst=1)
    source = -1
    if rank == 1:
        source = dist.recv_object_list(sent, src=0)
    return [everyone, at_two, told, part, sent, source]


@case
def subgroup(dist: Any, rank: int) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        return [dist.get_rank(group), dist.get_world_size(group)]
    total, told = mine(rank), mine(rank)
    dist.all_reduce(total, group=group)
    dist.broadcast(told, src=3, group=group)
    again = mine(rank)
    dist.broadcast(again, group_src=1, group=group)
    outputs = [torch.empty(5) for _ in range(2)] if rank == 3 else None
    dist.gather(mine(rank), outputs, dst=3, group=group)
    peer = 4 - rank
    got = torch.empty(5)
    work = dist.isend(mine(rank), peer, group=group)
    source = dist.recv(got, peer, group=group)
    work.wait()
    everyone = [None, None]
    dist.all_gather_object(everyone, rank, group=group)
    facts = [
        dist.get_rank(group),
        dist.get_world_size(group),
        dist.get_process_group_ranks(group),
        dist.get_group_rank(group, 3),
        dist.get_global_rank(group, 0),
    ]
    return [total, told, again, outputs, got, source, everyone, facts]


@case
def subgroups(dist: Any, rank: int) -> Any:
    pair, pairs = dist.new_subgroups(group_size=2)
    total = mine(rank)
    dist.all_reduce(total, group=pair)
    odd_or_even, _ = dist.new_subgroups_by_enumeration([[0, 2], [3, 1]])
    other = mine(rank)
    dist.all_reduce(other, group=odd_or_even)
    lonely, both = dist.new_subgroups_by_enumeration([[0], [1]])
    return [total, len(pairs), other, dist.get_rank(odd_or_even), lonely is None, len(both)]


@case
def unsorted_group(dist: Any, rank: int) -> Any:
    group = dist.new_group([3, 0, 2], sort_ranks=False)
    if rank == 1:
        return None
    outputs = [torch.empty(5) for _ in range(3)]
    dist.all_gather(outputs, mine(rank), group=group)
    return [dist.get_rank(group), dist.get_process_group_ranks(group), outputs]


@case
def only_members_call(dist: Any, rank: int) -> Any:
    if rank == 3:
        outside = dist.new_group([0, 1, 2], use_local_synchronization=True)
        assert outside in (None, dist.GroupMember.NON_GROUP_MEMBER)  # None before torch 2.14
        return None
    group = dist.new_group([0, 1, 2], use_local_synchronization=True)
    total = mine(rank)
    dist.all_reduce(total, group=group)
    return total


@case
def facts(dist: Any, rank: int) -> Any:
    return [
        dist.is_initialized(),
        dist.is_available(),
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_process_group_ranks(None),
        dist.get_global_rank(dist.group.WORLD, 2),
        dist.get_group_rank(dist.group.WORLD, 2),
        dist.get_rank(dist.group.WORLD),
        dist.is_torchelastic_launched(),
        dist.get_node_local_rank(fallback_rank=5),
    ]
