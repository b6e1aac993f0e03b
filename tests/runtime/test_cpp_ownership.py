"""Objects that only C++ holds still work: works of every kind of call, stores, groups."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import TENANTS, run_ranks
from support.torch_features import has
from torch import distributed
from torch.distributed import distributed_c10d as c10d

import dist2
from dist2 import GroupAbortedError, ProcessGroup, Store, Work
from dist2.operation import cpp_work
from dist2.operation.cpp_work import CppWork, whole
from dist2.runtime import cpp_ownership as halves

dist: Any = distributed  # stubs lack most of it
WORLD = 2
Call = Callable[[ProcessGroup], Work]


def box_of(half: Any) -> Any:
    """Return the holder of the C++ half of a work or group."""
    return half.boxed()


def ones() -> torch.Tensor:
    return torch.ones(2)


def pair() -> list[torch.Tensor]:
    return [ones() for _ in range(WORLD)]


def with_options(name: str, *tensors: Any, asynchronous: bool = True) -> Call:
    kinds: dict[str, Any] = {
        "allreduce": c10d.AllreduceOptions,
        "broadcast": c10d.BroadcastOptions,
        "allgather": c10d.AllgatherOptions,
        "reduce_scatter": c10d.ReduceScatterOptions,
        "barrier": c10d.BarrierOptions,
    }
    options = kinds[name]()
    options.asyncOp = asynchronous
    return lambda pg: getattr(pg, name)(*tensors, options)


def coalesced(pg: ProcessGroup) -> Work:
    pg._start_coalescing(torch.device("cpu"))
    pg.allreduce([ones()])
    pg.allreduce([ones()])
    return pg._end_coalescing(torch.device("cpu"))


def to_the_other(pg: ProcessGroup) -> Work:
    return pg.isend(ones(), 1) if pg.rank() == 0 else pg.irecv(ones(), 0)


def as_c10d_sends(pg: Any) -> Work:
    made: Work = pg.send([ones()], 1, 0) if pg.rank() == 0 else pg.recv_anysource([ones()], 0)
    return made


CALLS: dict[str, Call] = {
    "synchronous": lambda pg: pg.all_reduce(ones()),
    "asynchronous": lambda pg: pg.all_reduce(ones(), async_op=True),
    "gathered": lambda pg: pg.all_gather(pair(), ones(), async_op=True),
    "exchanged": lambda pg: pg.all_to_all_single(ones(), ones(), async_op=True),
    "barrier": lambda pg: pg.barrier(async_op=True),
    "messages": to_the_other,
    "batch": coalesced,
    "several tensors": lambda pg: pg.all_reduce_coalesced(pair(), async_op=True),
    "as c10d, all_reduce": with_options("allreduce", [ones()]),
    "as c10d, all_reduce, synchronous": with_options("allreduce", [ones()], asynchronous=False),
    "as c10d, broadcast": with_options("broadcast", [ones()]),
    "as c10d, all_gather": with_options("allgather", [pair()], [ones()]),
    "as c10d, reduce_scatter": with_options("reduce_scatter", [ones()], [pair()]),
    "as c10d, barrier": with_options("barrier"),
    "as c10d, messages": as_c10d_sends,
}


def divides(pg: ProcessGroup, count: Work) -> None:
    """Give a Work to a `Reducer`, which keeps its C++ half: its first value divides gradients."""
    parameter = torch.nn.Parameter(torch.ones(1))
    reducer: Any = dist.Reducer([parameter], [[0]], [1 << 20], pg)
    reducer._set_forward_pass_work_handle(count, False)
    del count
    gc.collect()
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    parameter.sum().backward()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_work_that_only_cpp_holds_can_be_waited_for(call: Call) -> None:
    def body(pg: ProcessGroup) -> weakref.ref[Work]:
        made = call(pg)
        gone = weakref.ref(made)
        box = box_of(made)
        del made
        gc.collect()
        held = dist.Work.unbox(box)
        assert type(held) is CppWork
        assert held.wait(timedelta(seconds=10))
        assert held.is_success()
        assert isinstance(held.get_future().wait(), list)
        return gone

    gone = run_ranks(WORLD, body, TENANTS[0])
    gc.collect()
    cpp_work._pinned.no_longer_held()
    assert [each() for each in gone] == [None, None]


def test_the_reducer_divides_by_a_work_that_only_it_holds() -> None:
    def body(pg: ProcessGroup) -> None:
        light = pg.all_reduce(
            torch.ones(1)
        )  # before the queue has a thread, which may still be leaving later
        assert type(light) is Work
        assert isinstance(light, Work)
        divides(pg, whole(pg.all_reduce(torch.ones(1), async_op=True)))
        divides(pg, pg.allreduce(torch.ones(1)))
        with pytest.raises(TypeError, match="incompatible"):  # C++ takes those of c10d's names
            divides(pg, light)
        divides(pg, whole(light))
        divides(pg, with_options("allreduce", [torch.ones(1)])(pg))

    run_ranks(WORLD, body, TENANTS[0])


def test_works_that_cpp_let_go_of_do_not_pile_up() -> None:
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        boxes = [box_of(pg.barrier()) for _ in range(200)]
        assert len(cpp_work._pinned) >= 200
        boxes.clear()
        for _ in range(40):
            box_of(pg.barrier())
        assert len(cpp_work._pinned) < 20


def test_where_the_count_cannot_be_read_the_last_works_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_work, "layout_is_known", lambda: False)
    monkeypatch.setattr(cpp_work, "held_by_cpp", lambda _: True)
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        for _ in range(200):
            box_of(pg.barrier())
        box = box_of(pg.barrier())
        assert type(dist.Work.unbox(box)) is CppWork
    assert len(cpp_work._presumed_held) <= 64
    cpp_work._presumed_held.clear()


# Stores


def _file(folder: Path) -> Store:
    return dist2.FileStore(str(folder / "store"), 1)


STORES: dict[str, Callable[[Path], Store]] = {
    "hash": lambda _: dist2.HashStore(),
    "file": _file,
    "tcp": lambda _: dist2.TCPStore("127.0.0.1", 0, is_master=True),
    "prefix of ours": lambda _: dist2.PrefixStore("below", dist2.HashStore()),
    "prefix of torch's": lambda _: dist2.PrefixStore("below", dist.HashStore()),
}


@pytest.mark.parametrize("kind", STORES)
def test_a_store_that_only_cpp_holds_works(kind: str, tmp_path: Path) -> None:
    made = STORES[kind](tmp_path)
    gone = weakref.ref(made)
    holders: list[Any] = [dist.PrefixStore("p", made), dist.ProcessGroup(made, 0, 1)]
    if has("store_collectives"):
        holders.append(dist._StoreCollectives(made, 0, 1))
    del made
    gc.collect()
    if len(holders) > 2:
        holders[2].barrier("key", timedelta(seconds=5), True)
    holders[0].set("key", "value")
    assert holders[0].get("key") == b"value"
    holders.clear()
    for _ in range(4):
        dist2.HashStore()
    gc.collect()
    assert gone() is None


def test_a_store_that_python_got_back_is_not_closed() -> None:
    wrapped = dist.PrefixStore("p", dist2.HashStore())
    gc.collect()
    back: Any = wrapped.underlying_store
    del wrapped
    for _ in range(4):
        dist2.HashStore()
    back.set("key", "value")
    assert back.get("key") == b"value"


def test_gloo_goes_on_with_a_store_that_it_alone_holds(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    sums: list[float] = []

    def rank(number: int) -> None:
        gloo = dist.ProcessGroupGloo(dist2.FileStore(path, WORLD), number, WORLD, timedelta(seconds=20))
        gc.collect()
        tensor = torch.ones(1)
        gloo.allreduce([tensor]).wait()
        sums.append(tensor.item())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == [2.0, 2.0]


# Groups


def test_a_group_that_only_cpp_holds_works() -> None:
    pg = dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1)
    box = box_of(pg)
    del pg
    gc.collect()
    held: Any = dist.ProcessGroup.unbox(box)
    assert held.all_reduce(ones()).wait()
    held.shutdown()


def test_a_closed_group_that_only_cpp_holds_says_so() -> None:
    pg = dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1)
    gone = weakref.ref(pg)
    box = box_of(pg)
    pg.shutdown()
    del pg
    gc.collect()
    held: Any = dist.ProcessGroup.unbox(box)
    with pytest.raises(GroupAbortedError, match="was shut down"):
        held.all_reduce(ones())
    del held, box
    gc.collect()
    dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1).shutdown()
    gc.collect()
    assert gone() is None


def test_the_layout_is_known() -> None:
    assert halves.layout_is_known()
