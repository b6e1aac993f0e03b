"""Behaviour of dist2's global API beyond torch's tests: cases for all ranks, each checking itself."""

from __future__ import annotations

import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from legacy.cases import SIZE, mine
from torch.distributed import HashStore

import dist2
import dist2.legacy as dist
from dist2.rendezvous import url as meeting

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


def total(ranks: Any, numel: int = 5) -> torch.Tensor:
    """Return the sum of these ranks' contributions."""
    return torch.stack([mine(rank, numel) for rank in ranks]).sum(0)


def uneven_sizes(rank: int) -> None:
    outputs = [torch.empty(each + 1) for each in range(SIZE)]
    dist.all_gather(outputs, mine(rank, rank + 1))
    assert all(torch.equal(output, mine(each, each + 1)) for each, output in enumerate(outputs))
    sent = [mine(rank, each + 1) for each in range(SIZE)]
    received = [torch.empty(rank + 1) for _ in range(SIZE)]
    dist.all_to_all(received, sent)
    assert all(torch.equal(output, mine(each, rank + 1)) for each, output in enumerate(received))
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, sent)
    assert torch.equal(part, total(range(SIZE), rank + 1))


def reduce_leaves_others_alone(rank: int) -> None:
    tensor = mine(rank)
    dist.reduce(tensor, dst=1)
    assert torch.equal(tensor, total(range(SIZE)) if rank == 1 else mine(rank))


def inside_a_block(rank: int) -> None:
    """Inside ``with process_group(pg)`` that group is the default one, with ranks of its own."""
    whole = dist.group.WORLD
    assert isinstance(whole, dist2.ProcessGroup)
    pair = whole.split([1, 3]) if rank in (1, 3) else whole.split([0, 2])
    assert pair is not None
    with dist2.process_group(pair):
        assert dist.group.WORLD is dist.GroupMember.WORLD is pair
        assert (dist.get_rank(), dist.get_world_size()) == (rank // 2, 2)
        assert dist.get_process_group_ranks(None) == [0, 1]
        tensor = mine(rank)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total([rank % 2, rank % 2 + 2]))
        told = mine(rank)
        dist.broadcast(told, src=1)  # the pair's rank 1
        assert torch.equal(told, mine(rank % 2 + 2))
        got = torch.empty(5)
        works = [dist.isend(mine(rank), 1 - rank // 2), dist.irecv(got, 1 - rank // 2)]
        for work in works:
            work.wait()
        # An explicit group keeps the ranks of the whole job.
        assert dist.get_process_group_ranks(pair) == [rank % 2, rank % 2 + 2]
        told = mine(rank)
        dist.broadcast(told, src=rank % 2, group=pair)
        assert torch.equal(told, mine(rank % 2))
        dist.all_reduce(everyone := mine(rank), group=whole)
        assert torch.equal(everyone, total(range(SIZE)))
        with dist2.process_group(whole):
            assert dist.get_rank() == rank
        lone = dist.new_group([1])  # the pair's rank 1
        assert dist.get_rank(lone) == (0 if rank // 2 else -1)
        if rank // 2:
            assert dist.get_process_group_ranks(lone) == [rank]
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(dist.get_world_size()))
        thread.start()
        thread.join()
        assert seen == [SIZE]  # other threads are not in the block
    assert (dist.get_rank(), dist.get_world_size()) == (rank, SIZE)
    with pytest.raises(KeyError), dist2.process_group(pair):
        raise KeyError
    assert dist.group.WORLD is whole
    pair.shutdown()


def outside_a_group(rank: int) -> None:
    """Every operation on a group that one is not in warns and does nothing."""
    tensor = mine(rank)
    calls: dict[str, Any] = {
        "broadcast": lambda: dist.broadcast(tensor, 0, group=OUTSIDE),
        "all_reduce": lambda: dist.all_reduce(tensor, group=OUTSIDE),
        "reduce": lambda: dist.reduce(tensor, 0, group=OUTSIDE),
        "all_gather": lambda: dist.all_gather([tensor], tensor, group=OUTSIDE),
        "all_gather_single": lambda: dist.all_gather_single(tensor, tensor, group=OUTSIDE),
        "gather": lambda: dist.gather(tensor, group=OUTSIDE),
        "scatter": lambda: dist.scatter(tensor, group=OUTSIDE),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, [tensor], group=OUTSIDE),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(tensor, tensor, group=OUTSIDE),
        "all_to_all": lambda: dist.all_to_all([tensor], [tensor], group=OUTSIDE),
        "all_to_all_single": lambda: dist.all_to_all_single(tensor, tensor, group=OUTSIDE),
        "barrier": lambda: dist.barrier(OUTSIDE),
        "monitored_barrier": lambda: dist.monitored_barrier(OUTSIDE),
        "send": lambda: dist.send(tensor, 0, OUTSIDE),
        "isend": lambda: dist.isend(tensor, 0, OUTSIDE),
        "irecv": lambda: dist.irecv(tensor, 0, OUTSIDE),
        "all_gather_object": lambda: dist.all_gather_object([None], 1, OUTSIDE),
        "gather_object": lambda: dist.gather_object(1, group=OUTSIDE),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], group=OUTSIDE),
        "scatter_object_list": lambda: dist.scatter_object_list([1], group=OUTSIDE),
        "send_object_list": lambda: dist.send_object_list([1], 0, OUTSIDE),
    }
    for name, call in calls.items():
        with pytest.warns(UserWarning, match=f"Running {name} on global rank {rank} which does not belong"):
            assert call() is None
    for name, call in {
        "recv": lambda: dist.recv(tensor, 0, OUTSIDE),
        "recv_object_list": lambda: dist.recv_object_list([1], 0, OUTSIDE),
    }.items():
        with pytest.warns(UserWarning, match=f"Running {name} ") as said:
            assert call() == -1
        assert said[0].filename == __file__  # the warning points at the caller
    assert torch.equal(tensor, mine(rank))
    assert dist.get_rank(OUTSIDE) == dist.get_world_size(OUTSIDE) == -1
    dist.destroy_process_group(OUTSIDE)
    with pytest.raises(ValueError, match="Invalid process group specified"):
        dist.get_backend(OUTSIDE)


def wrong_arguments(rank: int) -> None:
    """The errors of torch, by type and by the words that users match; nothing is sent."""
    tensor, other = mine(rank), (rank + 1) % SIZE
    whole = dist.group.WORLD
    cases: list[tuple[type[BaseException], str, Any]] = [
        (TypeError, "Expected parameter `tensor` of type torch.Tensor", lambda: dist.all_reduce([1])),
        (TypeError, "Expected parameter `tensor_list` of type", lambda: dist.all_gather(tensor, tensor)),
        (ValueError, "different dtypes", lambda: dist.all_gather([tensor.int()] * SIZE, tensor)),
        (ValueError, "specify both group_rank and global", lambda: dist.broadcast(tensor, 0, group_src=1)),
        (ValueError, "Must specify global_rank or", lambda: dist.broadcast(tensor)),
        (ValueError, "Global rank 9 is not part of", lambda: dist.reduce(tensor, 9)),
        (ValueError, "Global rank 9 is not part of", lambda: dist.get_group_rank(whole, 9)),
        (ValueError, "Group rank 9 is not part of", lambda: dist.get_global_rank(whole, 9)),
        (ValueError, "destination rank should not be", lambda: dist.send(tensor, rank)),
        (ValueError, "source rank should not be", lambda: dist.recv_object_list([1], rank)),
        (ValueError, "``op``", lambda: dist.P2POp(dist.broadcast, tensor, other)),
        (ValueError, "``p2p_op_list``", lambda: dist.batch_isend_irecv([tensor])),
        (ValueError, "must NOT be specified", lambda: dist.gather(tensor, [tensor] * SIZE, dst=other)),
        (ValueError, "must be specified on destination", lambda: dist.gather(tensor, dst=rank)),
        (ValueError, "must be specified on source", lambda: dist.scatter(tensor, src=rank)),
        (ValueError, "twice", lambda: dist.init_process_group("gloo")),
        (ValueError, "new group's rank should be within", lambda: dist.new_group([0, 9])),
        (ValueError, "duplicate", lambda: dist.new_group([0, 0])),
        (TypeError, "a rank must be an int, got '0'", lambda: dist.new_group("01")),
        (TypeError, "datetime.timedelta", lambda: dist.new_group([0], timeout=3)),  # also outside of it
        (ValueError, "got 'nobody'", lambda: dist.new_group([0], backend="nobody")),
        (TypeError, "must be a mapping", lambda: dist.new_group([0], pg_options=object())),
        (ValueError, "must be divisible by", lambda: dist.new_subgroups(3)),
        (ValueError, "must not exceed", lambda: dist.new_subgroups(SIZE + 1)),
        (ValueError, "multiple|both of two", lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])),
        (ValueError, "cannot be None or empty", lambda: dist.split_group(split_ranks=[])),
        (TypeError, "must be a list", lambda: dist.shrink_group(3)),
        (ValueError, "Invalid shrink_flags", lambda: dist.shrink_group([0], shrink_flags=7)),
        (TypeError, "datetime.timedelta", lambda: dist.barrier(timeout=3)),
        (TypeError, "must be a dist2 process group", lambda: dist.barrier(group="world")),
        (TypeError, r"object_list must be a list, got 'x' \(str\)", lambda: dist.broadcast_object_list("x")),
        (TypeError, "object_list must be a list", lambda: dist.all_gather_object((None,) * SIZE, 1)),
        (TypeError, "object_list must be a list", lambda: dist.send_object_list("x", other)),
        (ValueError, "place for each of the 4 ranks, got 3", lambda: dist.all_gather_object([1] * 3, 1)),
        (ValueError, "object_gather_list must have", lambda: dist.gather_object(1, [1], dst=rank)),
        (TypeError, "object_gather_list must be a list", lambda: dist.gather_object(1, "xyzw", dst=rank)),
        (TypeError, "op must be a ReduceOp, got 'sum'", lambda: dist.all_reduce(tensor, "sum")),
        (TypeError, "op must be a ReduceOp, got None", lambda: dist.all_reduce(tensor, None)),
        (TypeError, "a rank must be an int, got '0'", lambda: dist.broadcast(tensor, "0")),
        (TypeError, r"a rank must be an int, got 0\.0", lambda: dist.broadcast(tensor, 0.0)),
        (TypeError, r"group rank \(int\), got '0'", lambda: dist.broadcast(tensor, group_src="0")),
        (TypeError, "split sizes must be a list", lambda: dist.all_to_all_single(tensor, tensor, ["1"])),
        (TypeError, "object_list must be a list", lambda: dist.recv_object_list(None, other)),
        (ValueError, "already registered", lambda: dist.register_rendezvous_handler("tcp", None)),
        # A tensor where a list belongs, and a number where ranks do.
        (TypeError, "parameter `gather_list` of type List", lambda: dist.gather(tensor, tensor, dst=rank)),
        (TypeError, "parameter `scatter_list` of type List", lambda: dist.scatter(tensor, tensor, src=rank)),
        (TypeError, "object_gather_list must be a list", lambda: dist.gather_object(1, tensor, dst=rank)),
        (TypeError, "object_input_list must be a list", lambda: dist.scatter_object_list([1], tensor, rank)),
        (TypeError, r"ranks must be a list of ranks, got 5 \(int\)", lambda: dist.new_group(5)),
        (TypeError, "group_size must be an int, got '2'", lambda: dist.new_subgroups("2")),
        (TypeError, "group_size must be an int, got tensor", lambda: dist.new_subgroups(tensor)),
        (
            TypeError,
            r"list\[1\] must be a list of ranks",
            lambda: dist.new_subgroups_by_enumeration([[0], 1]),
        ),
        (TypeError, "must be a list of lists", lambda: dist.new_subgroups_by_enumeration(tensor)),
        (TypeError, r"split_ranks\[0\] must be a list of ranks, got 0", lambda: dist.split_group(whole, [0])),
        (TypeError, "split_ranks must be a list of lists", lambda: dist.split_group(whole, tensor)),
        (TypeError, r"backend must be a str, got 5 \(int\)", lambda: dist.is_backend_available(5)),
        (TypeError, "backend must be a str, got None", lambda: dist.BackendConfig(None)),
        (TypeError, "scheme must be a str, got 5", lambda: dist.register_rendezvous_handler(5, print)),
        (TypeError, "handler must be callable", lambda: dist.register_rendezvous_handler("x", None)),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    dist.barrier()


def groups_with_a_backend_of_their_own(rank: int) -> None:
    ranks = [0, 2, 3]
    for _ in range(2):  # twice: each gets its own keys in the store
        group = dist.new_group(ranks, backend="gloo", pg_options={"hostname": "127.0.0.1"})
        if rank == 1:
            assert group == OUTSIDE
            continue
        assert dist.get_backend(group) == dist.Backend.GLOO
        assert dist.get_process_group_ranks(group) == list(group.global_ranks) == ranks
        tensor = mine(rank)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, total(ranks))
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)


def names_are_agreed_on(rank: int) -> str:
    """A rank outside the first group must name the second as the others do."""
    dist.new_group([0, 1])
    group = dist.new_group()
    assert dist.get_pg_count() == 3
    assert isinstance(group, dist2.ProcessGroup)
    return group.group_name


def split_and_shrink(rank: int) -> None:
    half = dist.split_group(split_ranks=[[1, 0], [3]])
    if rank == 2:
        assert half is None
    else:
        tensor = mine(rank)
        dist.all_reduce(tensor, group=half)
        assert torch.equal(tensor, total([3] if rank == 3 else [0, 1]))
        assert dist.get_process_group_ranks(half) == ([3] if rank == 3 else [0, 1])
    if rank in (0, 1):
        alone = dist.shrink_group([1 - rank], group=half)
        assert dist.get_process_group_ranks(alone) == [rank]
    dist.barrier()
    if rank == 1:
        return
    left = dist.shrink_group([1])
    assert dist.group.WORLD is left
    assert (dist.get_rank(), dist.get_world_size()) == ([0, 2, 3].index(rank), 3)
    assert dist.get_process_group_ranks(None) == [0, 1, 2]  # ranks are counted anew
    tensor = mine(rank)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total([0, 2, 3]))
    pair = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        dist.broadcast(tensor, src=2, group=pair)
        assert dist.get_process_group_ranks(pair) == [1, 2]
    swapped = left.split([2, 0, 1])  # not made here, but of the new default group
    assert dist.get_process_group_ranks(swapped) == [2, 0, 1]
    dist.broadcast(told := mine(dist.get_rank()), src=1, group=swapped)
    assert torch.equal(told, mine(1))
    swapped.shutdown()


def coalescing(rank: int) -> None:
    tensors = [mine(rank, numel) for numel in (3, 5)]
    with dist._coalescing_manager() as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert len(manager.works) == 2
    assert all(torch.equal(tensor, total(range(SIZE), tensor.numel())) for tensor in tensors)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(again := mine(rank), async_op=True)
    manager.wait()
    assert torch.equal(again, total(range(SIZE)))


def pickles_behind_a_switch(rank: int) -> None:
    """Plain data needs none; the rest is pickled, as torch does, only where the environment says so."""
    everyone = [None] * SIZE
    with pytest.raises(ValueError, match=r"type type.*allow_pickle=True|of rank . was not sent"):
        dist.all_gather_object(everyone, Path)
    os.environ["DIST2_ALLOW_PICKLE"] = "1"
    try:
        dist.all_gather_object(everyone, Path)
        assert everyone == [Path] * SIZE
        dist.all_gather_object(everyone, KeyError(rank))
        assert list(map(repr, everyone)) == [f"KeyError({each})" for each in range(SIZE)]
    finally:
        del os.environ["DIST2_ALLOW_PICKLE"]
    if rank == 0:
        dist.broadcast_object_list([1])
    else:
        with pytest.raises(ValueError, match="object_list has 2 places, and 1 objects arrived"):
            dist.broadcast_object_list([None, None])


def objects_from_any_rank(rank: int) -> None:
    if rank == 0:
        sources = set()
        for _ in range(SIZE - 1):
            told = [None]
            source = dist.recv_object_list(told)
            assert told == [{"from": source}]
            sources.add(source)
        assert sources == {1, 2, 3}
    else:
        dist.send_object_list([{"from": rank}], 0)
    nothing: list[Any] = []
    dist.broadcast_object_list(nothing)
    assert nothing == []


def ranks_and_sizes_in_tensors(rank: int) -> None:
    """Values that convert to an int are accepted, as in torch."""
    whole = torch.arange(SIZE)
    group = dist.new_group(whole)
    dist.broadcast(told := mine(rank), whole[2], group=group)
    assert torch.equal(told, mine(2))
    for sizes in (torch.ones(SIZE, dtype=torch.int64), list(torch.ones(SIZE, dtype=torch.int64))):
        received = torch.empty(SIZE, dtype=torch.int64)
        dist.all_to_all_single(received, whole + 10 * rank, sizes, sizes)
        assert torch.equal(received, 10 * whole + rank)


def a_future_of_tensors(rank: int) -> None:
    tensors = [mine(rank), mine(rank, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        future = dist.all_reduce_coalesced(tensors, async_op=True)
    found = future.wait()
    assert found[0] is tensors[0]
    assert torch.equal(found[1], total(range(SIZE), 2))


def complex_beside_real(rank: int) -> None:
    for real, wide in ((torch.float32, torch.complex64), (torch.float64, torch.complex128)):
        tensors = [torch.ones(2, dtype=real), torch.full((3,), 1 + 2j, dtype=wide)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced(tensors)
        assert tensors[0].tolist() == [SIZE, SIZE]
        assert tensors[1].tolist() == [SIZE * (1 + 2j)] * 3
    with warnings.catch_warnings(), pytest.raises(ValueError, match="different dtypes"):
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced([torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.complex64)])
    with pytest.raises(ValueError, match=r"outputs.0. has dtype torch.complex64"):
        dist.all_gather([torch.ones(2, dtype=torch.complex64)] * SIZE, torch.ones(2))


def timeouts(rank: int) -> None:
    slow = dist.new_group(timeout=timedelta(seconds=7))
    assert slow.timeout_s == 7
    assert dist.group.WORLD.timeout_s == 20
    with pytest.warns(UserWarning, match="as a timedelta"):
        dist.monitored_barrier(timeout=5.0, wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(TimeoutError, match=r"1, 2, 3"):
            dist.monitored_barrier(slow, timedelta(seconds=0.2), wait_all_ranks=True)


def init_again(rank: int, backend: str, store_path: str) -> None:
    """End, and begin anew with a store, and then with a handler of one's own."""
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    assert dist.get_pg_count() == 0
    store = dist.FileStore(f"{store_path}/a", SIZE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=20))
    dist.all_reduce(tensor := mine(rank))
    assert torch.equal(tensor, total(range(SIZE)))
    dist.destroy_process_group()

    def handler(url: str, **keywords: Any) -> Any:
        assert url == f"ours://place?rank={rank}&world_size={SIZE}"
        assert keywords == {"timeout": timedelta(seconds=9)}
        yield dist.FileStore(f"{store_path}/b", SIZE), rank, SIZE

    if "ours" not in meeting._handlers:
        dist.register_rendezvous_handler("ours", handler)
    dist.init_process_group(backend, "ours://place", timedelta(seconds=9), SIZE, rank)
    dist.barrier()
    assert dist.get_rank() == rank
    del meeting._handlers["ours"]


def meshes_after_a_shrink(rank: int, store_path: str) -> None:
    """The groups that torch makes for a mesh count in the new default group."""
    store = dist.FileStore(store_path, SIZE)
    dist.init_process_group("socket", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=20))
    dist.barrier()
    if rank > 0:
        dist.shrink_group([0])
        me = dist.get_rank()
        own = dist.init_device_mesh("cpu", (3, 1)).get_group(1)
        assert dist.get_process_group_ranks(own) == [me]
        dist.broadcast(mine(me), src=me, group=own)
    dist.destroy_process_group()


def alone(rank: int) -> None:
    """One rank a world, over a store that only it has."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(tensor := mine(rank))
    assert torch.equal(tensor, mine(rank))
    everyone = [None]
    dist.all_gather_object(everyone, "me")
    assert everyone == ["me"]
    dist.destroy_process_group()
