"""Tensors that torch guards or that have lost memory: taken, or refused before anything is sent."""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from support.ranks import Tenant, run_ranks
from torch.distributed import ReduceOp

from dist2 import InvalidUsageError, ProcessGroup, premul_sum, shared_empty

TENANTS = (
    Tenant("inproc", "socket", {"transport": "inproc"}),
    Tenant("tcp", "socket", {"transport": "tcp"}),
    Tenant("shm", "socket", {"transport": "shm"}),
    Tenant("hosts", "socket", layout=(0, 1)),
)
ON_ALL = pytest.mark.parametrize("tenant", TENANTS, ids=str)

Make = Callable[[int], torch.Tensor]
Call = Callable[[ProcessGroup, torch.Tensor, Make], object]
"""A call on a tensor and others, made by a function of their lengths."""

COLLECTIVES: dict[str, Call] = {
    "all_reduce": lambda pg, tensor, make: pg.all_reduce(tensor),
    "all_reduce max": lambda pg, tensor, make: pg.all_reduce(tensor, ReduceOp.MAX),
    "all_reduce avg": lambda pg, tensor, make: pg.all_reduce(tensor, ReduceOp.AVG),
    "all_reduce premul": lambda pg, tensor, make: pg.all_reduce(tensor, premul_sum(1)),
    "all_reduce async": lambda pg, tensor, make: pg.all_reduce(tensor, async_op=True).wait(),
    "coalesced": lambda pg, tensor, make: pg.all_reduce_coalesced([make(3), tensor]),
    "c10d": lambda pg, tensor, make: pg.allreduce([tensor]).wait(),
    "broadcast": lambda pg, tensor, make: pg.broadcast(tensor),
    "reduce": lambda pg, tensor, make: pg.reduce(tensor),
    "all_gather": lambda pg, tensor, make: pg.all_gather(
        [make(tensor.numel()), tensor], make(tensor.numel())
    ),
    "all_gather of": lambda pg, tensor, make: pg.all_gather([make(tensor.numel()) for _ in range(2)], tensor),
    "all_gather_single": lambda pg, tensor, make: pg.all_gather_single(tensor, make(tensor.numel() // 2)),
    "all_gather_single of": lambda pg, tensor, make: pg.all_gather_single(make(2 * tensor.numel()), tensor),
    "reduce_scatter": lambda pg, tensor, make: pg.reduce_scatter(
        make(tensor.numel()), [tensor, make(tensor.numel())]
    ),
    "reduce_scatter_single": lambda pg, tensor, make: pg.reduce_scatter_single(
        tensor, make(2 * tensor.numel())
    ),
    "gather": lambda pg, tensor, make: pg.gather(
        [make(tensor.numel()) for _ in range(2)] if pg.rank() == 0 else None, tensor
    ),
    "scatter": lambda pg, tensor, make: pg.scatter(
        tensor, [make(tensor.numel()) for _ in range(2)] if pg.rank() == 0 else None
    ),
    "all_to_all": lambda pg, tensor, make: pg.all_to_all(
        [make(tensor.numel()), tensor], [make(tensor.numel()) for _ in range(2)]
    ),
    "all_to_all of": lambda pg, tensor, make: pg.all_to_all(
        [make(tensor.numel()) for _ in range(2)], [make(tensor.numel()), tensor]
    ),
    "all_to_all_single": lambda pg, tensor, make: pg.all_to_all_single(tensor, make(tensor.numel())),
}


def both(pg: ProcessGroup, out: torch.Tensor, into: torch.Tensor, *, background: bool) -> None:
    """Send a tensor to the other rank while receiving from it."""
    work = pg.isend(out, 1 - pg.rank())
    if background:
        pg.irecv(into, 1 - pg.rank()).wait()
    else:
        pg.recv(into, 1 - pg.rank())
    work.wait()


MESSAGES: dict[str, Call] = {
    "recv": lambda pg, tensor, make: both(pg, make(tensor.numel()), tensor, background=False),
    "irecv": lambda pg, tensor, make: both(pg, make(tensor.numel()), tensor, background=True),
    "send": lambda pg, tensor, make: both(pg, tensor, make(tensor.numel()), background=False),
}


def inferred(numel: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(numel)


MODES: dict[str, tuple[Make, bool]] = {
    "tensors of inference mode outside": (inferred, False),
    "inside": (inferred, True),
    "plain ones inside": (torch.ones, True),
    "plain ones": (torch.ones, False),
}


def under(inference: bool, call: Callable[[], object]) -> None:
    with torch.inference_mode(inference):
        call()


@ON_ALL
@pytest.mark.parametrize("numel", [2, 400_000])
@pytest.mark.parametrize("first", MODES)
def test_inference_mode_makes_no_difference(tenant: Tenant, first: str, numel: int) -> None:
    """In any order: what the first call keeps, such as scratch, serves the others."""

    def body(pg: ProcessGroup) -> None:
        for name in (first, *MODES):
            make, inference = MODES[name]
            for call in (*COLLECTIVES.values(), *MESSAGES.values()):
                under(inference, lambda call=call, make=make: call(pg, make(numel), make))
            tensor = make(numel)
            under(inference, lambda tensor=tensor: pg.all_reduce(tensor))
            assert tensor.min() == tensor.max() == 2, name

    run_ranks(2, body, tenant)


@ON_ALL
@pytest.mark.parametrize("numel", [2, 400_000])
def test_inference_mode_on_strided_tensors_in_the_background(tenant: Tenant, numel: int) -> None:
    """A receive that ends in another thread copies its message outside of the caller's mode."""

    def body(pg: ProcessGroup) -> None:
        with torch.inference_mode():
            into = torch.zeros(2 * numel)[::2]
            work = pg.irecv(into, 1 - pg.rank())
            reduced = torch.ones(2 * numel)[::2]
            reducing = pg.all_reduce(reduced, async_op=True)
        pg.send(torch.ones(numel), 1 - pg.rank())
        work.wait()
        reducing.wait()
        assert into.min() == 1 and reduced.min() == reduced.max() == 2

    run_ranks(2, body, tenant)


SHAPES: dict[str, Make] = {
    "whole": torch.ones,
    "behind others": lambda numel: torch.ones(2 * numel)[numel:],
    "every other": lambda numel: torch.ones(2 * numel)[::2],
}


@ON_ALL
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("left", [0, 4])
def test_a_tensor_beyond_its_storage_is_refused_before_anything_is_sent(
    tenant: Tenant, shape: str, left: int
) -> None:
    def refuse(call: Callable[[], object]) -> None:
        with pytest.raises(InvalidUsageError, match=r"made smaller|its storage was freed"):
            call()

    def body(pg: ProcessGroup) -> None:
        for call in COLLECTIVES.values():
            tensor = SHAPES[shape](64)
            call(pg, tensor, torch.ones)  # from now on there is a plan
            tensor.untyped_storage().resize_(left)
            refuse(lambda call=call, tensor=tensor: call(pg, tensor, torch.ones))
        tensor = SHAPES[shape](64)
        both(pg, tensor, torch.ones(64), background=False)
        both(pg, torch.ones(64), tensor, background=True)
        tensor.untyped_storage().resize_(left)
        for message in (pg.send, pg.isend, pg.recv, pg.irecv):
            refuse(lambda message=message: message(tensor, 1 - pg.rank()))
        refuse(lambda: pg.recv(tensor))
        with pg.coalescing() as batch:
            assert batch is not None
            refuse(lambda: pg.all_reduce(tensor))
            pg.all_reduce(torch.ones(3))
        result = torch.ones(2)
        pg.all_reduce(result)
        assert result.tolist() == [2, 2]

    run_ranks(2, body, tenant)


def wide(value: float) -> torch.Tensor:
    """Return a tensor that is long enough for ranks to read it in place where its memory is mapped."""
    return torch.full((800_000,), value)


STRIDED: dict[str, Callable[[float], torch.Tensor]] = {
    "every other": lambda value: wide(value)[::2],
    "transposed": lambda value: wide(value).view(400, 2_000).t(),
    "shared_empty": lambda value: shared_empty(800_000).fill_(value)[::2],
}


@ON_ALL
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_long_strided_tensors_are_reduced_in_place(
    tenant: Tenant, make: Callable[[float], torch.Tensor], background: bool
) -> None:
    """In every operation that has the same tensor as input and output."""

    def body(pg: ProcessGroup) -> None:
        rank = pg.rank()
        for root in range(2):
            tensor = make(rank + 1.0)
            pg.reduce(tensor, root, async_op=background).wait()
            assert tensor.min() == tensor.max() == (3 if rank == root else rank + 1)
            tensor = make(rank + 1.0)
            pg.broadcast(tensor, root, async_op=background).wait()
            assert tensor.min() == tensor.max() == root + 1
            parts = [make(0.0) for _ in range(2)]
            parts[rank] = make(rank + 1.0)
            pg.gather(parts if rank == root else None, parts[rank], root, async_op=background).wait()
            assert rank != root or [part.max() for part in parts] == [1, 2] == [part.min() for part in parts]
        tensor = make(rank + 1.0)
        pg.all_reduce(tensor, async_op=background).wait()
        assert tensor.min() == tensor.max() == 3

    run_ranks(2, body, tenant)


@ON_ALL
@pytest.mark.parametrize("numel", [2, 400_000])
def test_the_default_device_makes_no_difference(tenant: Tenant, numel: int) -> None:
    """Memory that a call needs is the host's inside of ``torch.device(...)`` too."""

    def columns(count: int) -> torch.Tensor:
        return torch.ones(count, 2, device="cpu")[:, 0]

    def body(pg: ProcessGroup) -> None:
        rank = pg.rank()
        with torch.device("meta"):
            for call in (*COLLECTIVES.values(), *MESSAGES.values()):
                call(pg, columns(numel), columns)
            tensor = columns(numel)
            pg.all_reduce(tensor)
            assert pg.all_gather_object(rank) == [0, 1]
            assert pg.gather_object(rank) in (None, [0, 1])
            assert pg.broadcast_object("root") == "root"
            assert pg.scatter_object([0, 1] if rank == 0 else None) == rank
            if rank == 0:
                pg.send_object({"none": columns(0)}, 1)
            else:
                assert pg.recv_object()[0]["none"].is_cpu
            pg.split_by(0).barrier()
            shared_empty(numel).fill_(1)
        assert tensor.min() == tensor.max() == 2

    run_ranks(2, body, tenant)


@ON_ALL
def test_a_tensor_without_dimensions_is_a_row(tenant: Tenant) -> None:
    def alone(pg: ProcessGroup) -> None:
        for splits in (None, [1]):
            result = torch.tensor(0.0)
            pg.all_to_all_single(result, torch.tensor(3.0), splits, splits)
            assert result == 3

    def swap(pg: ProcessGroup) -> None:
        result, splits = torch.tensor(-1.0), [[0, 1], [1, 0]][pg.rank()]
        pg.all_to_all_single(result, torch.tensor(float(pg.rank())), splits, splits)
        assert result == 1 - pg.rank()

    run_ranks(1, alone, tenant)
    run_ranks(2, swap, tenant)


def test_a_group_of_one_takes_tensors_of_other_strides_and_shapes() -> None:
    def body(pg: ProcessGroup) -> None:
        source, result = torch.arange(8.0).view(2, 4).t(), torch.zeros(8)
        for call in (
            lambda: pg.scatter(result, [source]),
            lambda: pg.reduce_scatter(result, [source]),
            lambda: pg.all_to_all([result], [source]),
        ):
            result.zero_()
            call()
            assert result.tolist() == source.flatten().tolist()

    run_ranks(1, body, TENANTS[0])


INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def factors(dtype: torch.dtype) -> Iterator[float]:
    """Yield factors that a dtype cannot hold."""
    limits = torch.iinfo(dtype)
    yield from (
        1e30,
        -1e30,
        float("inf"),
        float("nan"),
        0.5,
        float(limits.max + 1),
        float(limits.min) * 2 - 1,
    )


@ON_ALL
def test_factors_that_integers_cannot_hold_are_refused_before_anything_is_sent(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        for dtype in INTEGERS:
            for factor in factors(dtype):
                op = premul_sum(factor)
                tensor, part = torch.ones(4).to(dtype), torch.ones(2).to(dtype)
                for call in (
                    lambda tensor=tensor, op=op: pg.all_reduce(tensor, op),
                    lambda tensor=tensor, op=op: pg.all_reduce(tensor, op, async_op=True),
                    lambda tensor=tensor, op=op: pg.reduce(tensor, 0, op),
                    lambda tensor=tensor, part=part, op=op: pg.reduce_scatter_single(part, tensor, op),
                ):
                    with pytest.raises(InvalidUsageError, match=r"premul_sum needs a whole factor of"):
                        call()
            fitting = torch.ones(2).to(dtype)
            pg.all_reduce(fitting, premul_sum(60))
            assert fitting.tolist() == [120, 120]

    run_ranks(2, body, tenant)


@pytest.mark.parametrize("tenant", [*TENANTS, Tenant("gloo", "gloo")], ids=str)
def test_the_root_of_a_broadcast_only_reads_its_tensor(tenant: Tenant) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(64)))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # a write to it ends the process
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that cannot be written to
            read_only = torch.frombuffer(mapped, dtype=torch.int32)
    sent = {
        "read-only": read_only,
        "read-only, strided": read_only.view(4, 4).t(),
        "expanded": torch.tensor([7]).expand(5),
        "expanded rows": torch.arange(3).expand(2, 3),
        "strided": torch.arange(12.0).view(3, 4).t(),
    }

    def body(pg: ProcessGroup) -> None:
        for name, tensor in sent.items():
            for async_op in (False, True):
                got = tensor if pg.rank() == 0 else torch.zeros(tensor.shape, dtype=tensor.dtype)
                pg.broadcast(got, 0, async_op=async_op).wait()
                assert got.equal(tensor), name
        shared = torch.zeros(1).expand(3)
        with pytest.raises(InvalidUsageError, match="tensor is written to, but its elements share memory"):
            pg.broadcast(shared, 1 - pg.rank())

    run_ranks(2, body, tenant)
