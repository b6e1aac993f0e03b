"""Ranks that are threads of one process, by `new_group` alone: cases beside the other conformance tests.

Those run their ranks as threads, too, with one group for each transport. The cases here are the default
transport, many groups one after the other, long tensors, and groups with several ranks in a process.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from support.oracle import extremes
from support.ranks import Tenant, run_ranks
from support.threads import ends_of, together
from torch._C import _distributed_c10d

import dist2
from dist2 import (
    HashStore,
    InvalidUsageError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
)
from dist2.backends.socket.transport.node import Node

TRANSPORTS = ("auto", "shm", "tcp", "inproc")
MIB = 1 << 18  # elements of float32

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def tenant(transport: str) -> Tenant:
    return Tenant(transport, "socket", {"transport": transport})


def total(pg: ProcessGroup, numel: int = 8) -> set[float]:
    """Return the values of an all_reduce of ranks counted from 1: one value if it is right."""
    mine = torch.full((numel,), pg.rank() + 1.0)
    pg.all_reduce(mine)
    return extremes(mine)


@transports
@pytest.mark.parametrize("world_size", [2, 8])
def test_everything_in_one_group(transport: str, world_size: int) -> None:
    """Twenty groups one after the other: a former version was wrong each time."""

    def body(pg: ProcessGroup) -> None:
        right, left = (pg.rank() + 1) % world_size, (pg.rank() - 1) % world_size
        expected = {world_size * (world_size + 1) / 2}
        assert total(pg) == expected
        assert total(pg, MIB) == expected
        came = torch.zeros(MIB)
        receiving = pg.irecv(came, left)
        pg.send(torch.full((MIB,), float(pg.rank())), right)
        receiving.wait()
        assert extremes(came) == {float(left)}
        works = [pg.all_reduce(torch.ones(number + 1), async_op=True) for number in range(5)]
        for work in works:
            work.wait()
        half = pg.split([0, 1])
        if half is not None:
            assert total(half, MIB) == {3.0}
            half.shutdown()
        pg.barrier()

    for _ in range(20 if world_size == 2 else 3):
        run_ranks(world_size, body, tenant(transport))


@transports
def test_failures_are_told_as_between_processes(transport: str) -> None:
    def differ(pg: ProcessGroup) -> None:
        with pytest.raises(MismatchError):
            pg.all_reduce(torch.ones(3 if pg.rank() else 4))

    def leave(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank():
            pg.abort()
            return
        with pytest.raises(PeerLostError, match="aborted the group") as caught:
            pg.all_reduce(torch.ones(3))
        assert caught.value.ranks == (1,)
        assert pg.shrink().size() == 1

    run_ranks(2, differ, tenant(transport))
    run_ranks(2, leave, tenant(transport))


def test_a_thread_that_ends_without_a_word_is_waited_for() -> None:
    """Its group stays open, and another thread may continue with it: the rank is not dead."""
    left: list[ProcessGroup] = []

    def stay(pg: ProcessGroup) -> None:
        with pytest.raises(OperationTimeoutError, match=r"rank 1 did not arrive"):
            pg.all_reduce(torch.ones(1), timeout=0.2)

    store = HashStore()

    def rank(number: int) -> None:
        pg = dist2.new_group("socket", 20.0, store=store, rank=number, world_size=2)
        if number:
            left.append(pg)
            return
        with pg:
            stay(pg)

    together(lambda: rank(0), lambda: rank(1))
    left[0].abort()


def test_groups_in_any_order_use_the_same_nodes() -> None:
    """Each thread keeps its node: links are shared, and handles stay the same."""
    stores = [HashStore() for _ in range(6)]

    def rank(number: int) -> list[str]:
        with dist2.new_group("socket", store=stores[0], rank=number, world_size=3) as first:
            handles = [first.handle()]
            for store in stores[1:]:
                with dist2.new_group("socket", store=store, rank=2 - number, world_size=3) as pg:
                    handles.append(pg.handle())
                    assert total(pg) == {6.0}
            return handles

    by_rank = together(*[lambda number=number: rank(number) for number in range(3)])
    assert all(len(set(handles)) == 1 for handles in by_rank)
    assert len({handles[0] for handles in by_rank}) == 3


@transports
def test_one_rank_groups_of_threads_merge(transport: str) -> None:
    """They were built separately, so that all have the same node."""
    store = HashStore()

    def rank(number: int) -> None:
        with dist2.new_group("socket", store=HashStore(), rank=0, world_size=1, transport=transport) as alone:
            ready.wait(20)
            with alone.merge_remote_group(store, 3, timeout=20) as pg:
                assert total(pg, MIB) == {6.0}
                pg.barrier()

    ready = threading.Barrier(3)
    together(*[lambda number=number: rank(number) for number in range(3)])


def test_one_rank_groups_of_threads_cannot_be_reconfigured() -> None:
    with (
        dist2.new_group("socket", store=HashStore(), rank=0, world_size=1) as one,
        dist2.new_group("socket", store=HashStore(), rank=0, world_size=1) as two,
        pytest.raises(InvalidUsageError, match="merge_remote_group"),
    ):
        one.reconfigure("together", [one.handle(), two.handle()])


def test_a_group_of_threads_is_reconfigured() -> None:
    handles: dict[int, str] = {}
    ready = threading.Barrier(3)

    def body(pg: ProcessGroup) -> None:
        handles[pg.rank()] = pg.handle()
        ready.wait(20)
        with pg.reconfigure("again", [handles[rank] for rank in (2, 0, 1)]) as again:
            assert again.rank() == (pg.rank() + 1) % 3
            assert total(again, MIB) == {6.0}
            again.barrier()

    run_ranks(3, body, tenant("auto"))


@transports
def test_an_address_of_ones_own_is_refused(transport: str) -> None:
    """Also by the rank that does not own it."""
    node, other, store = Node(), Node(), HashStore()

    def build(number: int, node: Node) -> ProcessGroup:
        place: dict[str, Any] = {"transport": transport, "node": node, "store": store}
        return dist2.new_group("socket", 20.0, rank=number, world_size=3, **place)

    try:
        errors = ends_of(lambda: build(0, node), lambda: build(1, other), lambda: build(2, node))
    finally:
        node.close()
        other.close()
    for error in errors:
        assert isinstance(error, InvalidUsageError | PeerLostError), error
        assert "ranks 0, 2 have published the same address" in str(error)


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "one_tcp_store": lambda folder: {"store": dist2.TCPStore("127.0.0.1", 0, is_master=True)},
    "one_file_store": lambda folder: {"store": dist2.FileStore(str(folder / "store"), 3)},
    "one_store_of_torch": lambda folder: {"store": torch.distributed.HashStore()},
    "a_file": lambda folder: {"init_method": f"file://{folder / 'meeting'}"},
}


@pytest.mark.parametrize("way", WAYS)
def test_wherever_they_meet(way: str, tmp_path: Path) -> None:
    met = WAYS[way](tmp_path)

    def rank(number: int) -> None:
        for _ in range(3):
            with dist2.new_group("socket", 20.0, rank=number, world_size=3, **met) as pg:
                assert total(pg) == {6.0}
                pg.barrier()

    together(*[lambda number=number: rank(number) for number in range(3)])


def test_names_stand_for_no_rank_or_each_threads_own() -> None:
    """A name in torch's table would stand for one of the ranks only, for any calling rank."""

    def by_name(pg: ProcessGroup) -> float:
        mine = torch.full((2,), pg.rank() + 1.0)
        found = functional.wait_tensor(functional.all_reduce(mine, "sum", pg))
        return float(found[0])

    def body(pg: ProcessGroup) -> float | str:
        pg.barrier()
        try:
            return by_name(pg)
        except RuntimeError as error:
            return str(error)
        finally:
            pg.barrier()

    for said in run_ranks(3, body, tenant("auto")):
        assert "Could not resolve the process group" in said
    isolate = _distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]  # not in its stubs
    isolate(True)
    try:
        assert run_ranks(3, body, tenant("auto")) == [6.0] * 3
    finally:
        isolate(False)


def test_many_ranks_need_little_address_space() -> None:
    """The memory of a rank is mapped once in the process, not once for each other rank."""

    def mapped() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def body(pg: ProcessGroup) -> int:
        assert total(pg) == {300.0}
        found = mapped()
        pg.barrier()
        return found

    gc.collect()  # of what earlier tests have mapped
    before = mapped()
    assert max(run_ranks(24, body, tenant("shm"))) - before < 24 * (41 << 30)
