"""Every operation at the sizes where lengths outgrow 31 and 32 bits, in bytes and in elements.

Inputs are mostly zeros, which take no memory until they are written; a few marks near the limits differ from
rank to rank. Each case takes up to 18 GiB.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup

pytestmark = [pytest.mark.exhaustive, pytest.mark.alone, pytest.mark.timeout(600)]

TENANTS = (
    Tenant("tcp", "socket", {"transport": "tcp"}),
    Tenant("shm", "socket", {"transport": "shm"}),
    Tenant("hosts", "socket", layout=(0, 1)),
)
SIZES = tuple(limit + beside for limit in (2**31, 2**32) for beside in (-1, 0, 1))
LIMITS = (0, 2**30, 2**31, 2**32)
LIMIT_S = 300.0
STRIDE = 4099
FEW = 5

Case = Callable[[ProcessGroup, int, torch.dtype], None]


def places(numel: int) -> list[int]:
    """Return the indices of marks: the ends, and those beside each limit."""
    near = {limit + beside for limit in (*LIMITS, numel // 2, numel) for beside in (-1, 0, 1)}
    return sorted(place for place in near if 0 <= place < numel)


def mark(rank: int, place: int) -> int:
    """Return the value of a mark: sums of two ranks' marks fit into 8 bits."""
    return 1 + rank + place % 7


def marked(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return zeros with the marks of a rank."""
    made = torch.zeros(numel, dtype=dtype)
    for place in places(numel):
        made[place] = mark(rank, place)
    return made


def marked_twice(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return two copies of `marked`, one after the other."""
    made = torch.zeros(2 * numel, dtype=dtype)
    for place in places(numel):
        made[place] = made[numel + place] = mark(rank, place)
    return made


def check(tensor: torch.Tensor, *ranks: int) -> None:
    """Check that a tensor is the sum of the marks of some ranks: near the marks, and in samples."""
    marks = places(tensor.numel())
    assert torch.count_nonzero(tensor[::STRIDE]) == sum(place % STRIDE == 0 for place in marks)
    for place in marks:
        expected = sum(mark(rank, place) for rank in ranks)
        assert int(tensor[place]) == expected, (place, int(tensor[place]), expected)
        begin = max(0, place - STRIDE)
        window = range(begin, min(place + STRIDE, tensor.numel()))
        nonzero = torch.count_nonzero(tensor[window.start : window.stop])
        assert nonzero == sum(each in window for each in marks)


def messages(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    """Blocking, and asynchronous from any rank."""
    if pg.rank() == 0:
        data = marked(numel, dtype, 0)
        pg.send(data, 1)
        pg.isend(data, 1, 7).wait()
        return
    target = torch.empty(numel, dtype=dtype)
    pg.recv(target, 0)
    check(target, 0)
    target.zero_()
    assert pg.recv(target, None, 7).source_rank() == 0
    check(target, 0)


def message_to_itself(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    if pg.rank() == 0:
        work, target = pg.isend(marked(numel, dtype, 0), 0), torch.empty(numel, dtype=dtype)
        pg.recv(target, 0)
        work.wait()
        check(target, 0)


def broadcast(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    data = marked(numel, dtype, 1) if pg.rank() == 1 else torch.empty(numel, dtype=dtype)
    pg.broadcast(data, 1)
    check(data, 1)


def all_reduce(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    data = marked(numel, dtype, pg.rank())
    pg.all_reduce(data)
    check(data, 0, 1)


def reduce(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    data = marked(numel, dtype, pg.rank())
    pg.reduce(data, 1)
    check(data, *((0, 1) if pg.rank() == 1 else (0,)))


def gathers_of_parts(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    """Gather parts that are together as long as the size; the odd one is left out."""
    half = numel // 2
    part = marked(half, dtype, pg.rank())
    whole = torch.empty(2 * half, dtype=dtype)
    parts = list(whole.chunk(2))
    pg.all_gather_single(whole, part)
    check(parts[0], 0)
    check(parts[1], 1)
    whole.zero_()
    pg.all_gather(parts, part)
    check(parts[0], 0)
    check(parts[1], 1)
    if pg.rank() == 1:
        whole.zero_()
    pg.gather(parts if pg.rank() == 1 else None, part, 1)
    check(parts[0], 0)
    check(parts[1], 1)


def gather_of_a_long_part(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    lengths = (FEW, numel)
    parts = [torch.empty(length, dtype=dtype) for length in lengths]
    pg.all_gather_v(parts, marked(lengths[pg.rank()], dtype, pg.rank()))
    check(parts[0], 0)
    check(parts[1], 1)


def scatters_of_parts(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    half, me = numel // 2, pg.rank()
    part = torch.empty(half, dtype=dtype)
    parts = [marked(half, dtype, dst) for dst in range(2)] if me == 0 else None
    pg.scatter(part, parts, 0)
    check(part, me)


def reduce_scatters_of_parts(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    half, me = numel // 2, pg.rank()
    whole = marked_twice(half, dtype, me)
    part = torch.empty(half, dtype=dtype)
    pg.reduce_scatter_single(part, whole)
    check(part, 0, 1)
    part.zero_()
    pg.reduce_scatter(part, list(whole.chunk(2)))
    check(part, 0, 1)


def reduce_scatter_of_a_long_part(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    lengths, me = (FEW, numel), pg.rank()
    part = torch.empty(lengths[me], dtype=dtype)
    pg.reduce_scatter_v(part, [marked(length, dtype, me) for length in lengths])
    check(part, 0, 1)


def exchange(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    half = numel // 2
    target = torch.empty(2 * half, dtype=dtype)
    pg.all_to_all_single(target, marked_twice(half, dtype, pg.rank()))
    check(target[:half], 0)
    check(target[half:], 1)


def exchange_of_a_long_part(pg: ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    lengths = ((FEW, numel), (FEW, FEW))
    me = pg.rank()
    given = [marked(length, dtype, me) for length in lengths[me]]
    taken = [torch.empty(lengths[src][me], dtype=dtype) for src in range(2)]
    pg.all_to_all(taken, given)
    check(taken[0], 0)
    check(taken[1], 1)


CASES: tuple[Case, ...] = (
    messages,
    message_to_itself,
    broadcast,
    all_reduce,
    reduce,
    gathers_of_parts,
    gather_of_a_long_part,
    scatters_of_parts,
    reduce_scatters_of_parts,
    reduce_scatter_of_a_long_part,
    exchange,
    exchange_of_a_long_part,
)


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Return the memory of one case before the next takes its own."""
    yield
    gc.collect()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_elements_of_one_byte(tenant: Tenant, case: Case, numel: int) -> None:
    run_ranks(2, lambda pg: case(pg, numel, torch.int8), tenant, timeout=LIMIT_S)


@pytest.mark.parametrize("case", [messages, broadcast, all_reduce], ids=lambda case: case.__name__)
@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_elements_of_two_bytes(tenant: Tenant, case: Case) -> None:
    """The number of elements is at the limit of 31 bits, that of bytes at that of 32."""
    for numel in (2**31 - 1, 2**31, 2**31 + 1):
        run_ranks(2, lambda pg, numel=numel: case(pg, numel, torch.int16), tenant, timeout=LIMIT_S)
