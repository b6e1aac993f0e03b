"""Every algorithm of the socket backend, forced by name, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from support.oracle import example, reduced
from support.ranks import TENANTS, Tenant, run_ranks
from torch.distributed import ReduceOp

from dist2 import InvalidUsageError, ProcessGroup
from dist2.backends.socket.algorithms.registry import ALGORITHMS, Algorithm
from dist2.operation.kinds import OpKind, Reduction

INPROC, SHM = TENANTS[0], TENANTS[2]
WORLD_SIZES = (2, 3, 4)
LAYOUTS = {2: (0, 1), 3: (0, 0, 1), 4: (0, 1, 0, 1)}
"""Hosts of the ranks, where an algorithm is for several: two with two, one with two beside a lonely one."""
NUMELS = (0, 1, 5, 1000, 70_001)
HOSTS = {size: Tenant("hosts", "socket", layout=layout) for size, layout in LAYOUTS.items()}
SUM = Reduction.of(ReduceOp.SUM)


def tenant_of(algorithm: Algorithm, world_size: int = 0, **options: object) -> Tenant:
    """Return where an algorithm runs: flat ones on shared memory, some on hosts, the others on messages."""
    home = SHM if algorithm.flat else INPROC
    if algorithm.hierarchical:
        home = HOSTS[world_size]
    return attrs.evolve(home, options={**home.options, "algorithm": algorithm.name, **options})


def dtype_of(algorithm: Algorithm) -> torch.dtype:
    """Return floats where the algorithm keeps the order of a sum, else integers, whose sums have none."""
    return torch.float32 if algorithm.ordered else torch.int64


Case = Callable[[ProcessGroup, int, torch.dtype], None]


def everyone_brings(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [example((numel,), dtype, rank, salt=numel) for rank in range(pg.size())]


def _all_reduce(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    everyone = everyone_brings(pg, numel, dtype)
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        mine = everyone[pg.rank()].clone()
        pg.all_reduce(mine, op)
        assert torch.equal(mine, reduced(everyone, Reduction.of(op)))
    several = [everyone[pg.rank()].clone(), everyone[pg.rank()].clone()]
    pg.all_reduce_coalesced(several)
    assert all(torch.equal(each, reduced(everyone, SUM)) for each in several)


def _reduce(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    everyone = everyone_brings(pg, numel, dtype)
    for root in range(pg.size()):
        mine = everyone[pg.rank()].clone()
        pg.reduce(mine, root)
        expected = reduced(everyone, SUM) if pg.rank() == root else everyone[pg.rank()]
        assert torch.equal(mine, expected)


def _reduce_scatter(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    me, size = pg.rank(), pg.size()
    for counts in ([numel] * size, [numel + rank for rank in range(size)]):
        everyone = [
            [example((count,), dtype, rank, salt=part) for part, count in enumerate(counts)]
            for rank in range(size)
        ]
        expected = reduced([parts[me] for parts in everyone], SUM)
        output = torch.zeros(counts[me], dtype=dtype)
        pg.reduce_scatter_v(output, everyone[me])
        assert torch.equal(output, expected)
    output = torch.zeros(numel, dtype=dtype)
    everyone = [parts[:1] * size for parts in everyone]
    pg.reduce_scatter_single(output, torch.cat(everyone[me]))
    assert torch.equal(output, reduced([parts[0] for parts in everyone], SUM))


def _broadcast(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    everyone = everyone_brings(pg, numel, dtype)
    for root in range(pg.size()):
        mine = everyone[pg.rank()].clone()
        pg.broadcast(mine, root)
        assert torch.equal(mine, everyone[root])


def _all_gather(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    everyone = everyone_brings(pg, numel, dtype)
    whole = torch.zeros(pg.size() * numel, dtype=dtype)
    pg.all_gather_single(whole, everyone[pg.rank()])
    assert torch.equal(whole, torch.cat(everyone))
    uneven = [example((numel * (rank % 2) + rank,), dtype, rank) for rank in range(pg.size())]
    outputs = [torch.zeros_like(each) for each in uneven]
    pg.all_gather_v(outputs, uneven[pg.rank()])
    assert all(map(torch.equal, outputs, uneven))


def _gather(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    everyone = everyone_brings(pg, numel, dtype)
    for root in range(pg.size()):
        outputs = [torch.zeros(numel, dtype=dtype) for _ in everyone] if pg.rank() == root else None
        pg.gather(outputs, everyone[pg.rank()], root)
        assert outputs is None or all(map(torch.equal, outputs, everyone))


def _scatter(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    everyone = everyone_brings(pg, numel, dtype)
    for root in range(pg.size()):
        output = torch.zeros(numel, dtype=dtype)
        pg.scatter(output, everyone if pg.rank() == root else None, root)
        assert torch.equal(output, everyone[pg.rank()])


def _all_to_all(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    me, size = pg.rank(), pg.size()

    def block(src: int, dst: int) -> torch.Tensor:
        return example(((src + 2 * dst) % 3 * numel,), dtype, src, salt=dst)

    expected = [block(src, me) for src in range(size)]
    outputs = [torch.zeros_like(each) for each in expected]
    pg.all_to_all(outputs, [block(me, dst) for dst in range(size)])
    assert all(map(torch.equal, outputs, expected))


def _barrier(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    pg.barrier()


CASES: dict[OpKind, Case] = {
    OpKind.ALL_REDUCE: _all_reduce,
    OpKind.REDUCE: _reduce,
    OpKind.REDUCE_SCATTER: _reduce_scatter,
    OpKind.BROADCAST: _broadcast,
    OpKind.ALL_GATHER: _all_gather,
    OpKind.GATHER: _gather,
    OpKind.SCATTER: _scatter,
    OpKind.ALL_TO_ALL: _all_to_all,
    OpKind.BARRIER: _barrier,
}


@pytest.mark.parametrize(
    ("algorithm", "world_size"),
    [
        pytest.param(algorithm, world_size, id=f"{world_size}-{algorithm.family.value}-{algorithm.name}")
        for world_size in WORLD_SIZES
        for algorithm in ALGORITHMS.values()
        if world_size > 2 or not algorithm.hierarchical  # two ranks are no hierarchy
        if world_size.bit_count() == 1 or not algorithm.paired
    ],
)
def test_an_algorithm_computes_what_the_oracle_does(algorithm: Algorithm, world_size: int) -> None:
    # Between hosts and inside them, floats add up in an order of their own: see `test_hosts.py`.
    dtype = torch.int64 if algorithm.hierarchical else dtype_of(algorithm)

    def body(pg: ProcessGroup) -> None:
        for numel in NUMELS:
            CASES[algorithm.family](pg, numel, dtype)

    run_ranks(world_size, body, tenant_of(algorithm, world_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["in one script", "folds by torch"])
@pytest.mark.parametrize(
    "algorithm",
    [each for each in ALGORITHMS.values() if each.streams],
    ids=lambda each: f"{each.family.value}-{each.name}",
)
def test_calls_of_several_blocks_are_repeated_on_other_tensors(
    algorithm: Algorithm, dtype: torch.dtype
) -> None:
    """The first call prepares the plan of the others."""
    lengths = (70_001, 70_001, 3 * 65_536, 70_001, 3 * 65_536)

    def body(pg: ProcessGroup) -> None:
        for numel in lengths:
            CASES[algorithm.family](pg, numel, dtype)

    run_ranks(3, body, tenant_of(algorithm))


REDUCING = (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER)


def on_hosts(algorithm: Algorithm) -> Tenant:
    """Return four ranks on two hosts, for any algorithm that sends messages."""
    return attrs.evolve(HOSTS[4], options={"algorithm": algorithm.name})


@pytest.mark.parametrize("hosts", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("family", REDUCING, ids=lambda family: family.value)
def test_ordered_algorithms_give_the_same_bits(family: OpKind, hosts: bool) -> None:
    """Every ordered algorithm adds floats in rank order: on every rank, by every transport.

    On several hosts with several ranks each they add up by host, and then the hosts.
    """

    def results(algorithm: Algorithm, home: Tenant) -> list[Any]:
        def body(pg: ProcessGroup) -> list[torch.Tensor]:
            found = []
            for dtype in (torch.float32, torch.bfloat16):
                everyone = everyone_brings(pg, 10_000, dtype)
                mine = everyone[pg.rank()].clone()
                if family is OpKind.REDUCE_SCATTER:
                    mine = torch.zeros(2_500, dtype=dtype)
                    pg.reduce_scatter_single(mine, everyone[pg.rank()])
                elif family is OpKind.REDUCE:
                    pg.reduce(mine, 2)
                else:
                    pg.all_reduce(mine)
                found.append(mine)
            return found

        return run_ranks(4, body, home)

    ordered = [each for each in ALGORITHMS.values() if each.family is family and each.ordered]
    if hosts:
        homes = [(each, on_hosts(each)) for each in ordered if not each.flat]
    else:
        homes = [(each, tenant_of(each)) for each in ordered if not each.hierarchical]
    assert len(homes) >= 2
    first, *others = [results(algorithm, home) for algorithm, home in homes]
    if family is OpKind.ALL_REDUCE:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first[0], first[3], strict=True))
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    "algorithm",
    [each for each in ALGORITHMS.values() if not each.ordered],
    ids=lambda each: f"{each.family.value}-{each.name}",
)
def test_unordered_algorithms_refuse_floats_until_told_otherwise(algorithm: Algorithm) -> None:
    world_size = 4 if algorithm.paired else 3

    def refused(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError, match=f"algorithm='{algorithm.name}' does not fit"):
            CASES[algorithm.family](pg, 1000, torch.float32)
        pg.split(range(world_size)).shutdown()  # the group still works

    def taken(pg: ProcessGroup) -> None:
        everyone = everyone_brings(pg, 1200, torch.float32)
        mine = everyone[pg.rank()].clone()
        pg.all_reduce(mine)
        torch.testing.assert_close(mine, reduced(everyone, SUM))

    run_ranks(world_size, refused, tenant_of(algorithm))
    run_ranks(world_size, taken, tenant_of(algorithm, deterministic=False))


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    def body(pg: ProcessGroup) -> None:
        with pytest.raises(
            InvalidUsageError, match="algorithm='magic' is unknown for all_reduce; suitable: "
        ):
            pg.all_reduce(torch.ones(3))

    run_ranks(2, body, attrs.evolve(INPROC, options={**INPROC.options, "algorithm": "magic"}))
