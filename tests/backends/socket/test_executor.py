"""The executor moves real bytes and folds real numbers, through an endpoint in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch
from support.memory_endpoint import PostOffice
from support.oracle import reduced
from support.schedule_cases import ALGORITHMS, algorithm_named, name_of, worlds_of

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import Copy, Exchange, Fence, Recv, Schedule, Send
from dist2.backends.socket.algorithms.spans import scratch, slot, source, target
from dist2.backends.socket.layout import Layout, Parts
from dist2.backends.socket.lowering import message_plan
from dist2.backends.socket.reduction import Folding, is_exact, prepare
from dist2.backends.socket.selection import Algorithm
from dist2.backends.socket.traffic import MessageHost, MessageProgram
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.errors import OperationTimeoutError
from dist2.operation.kinds import AVG, MAX, SUM, OpKind, ReduceKind, Reduction
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature
from dist2.runtime.deadline import FOREVER_NS, deadline_in

MESSAGES = [each for each in ALGORITHMS if not each.flat]
Tensors = Sequence[torch.Tensor]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EVERY_DTYPE = (torch.bool, *SIGNED, *UNSIGNED, *FLOATS, *COMPLEX, *FLOAT8)


def kind_of(name: str) -> Reduction:
    return Reduction.of(getattr(torch.distributed.ReduceOp, name))


def example(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers whose sum depends on the order of adding, where there are such."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex or dtype in FLOATS:
        real = torch.float64 if dtype is torch.complex128 else torch.float32
        shape = (numel, 2) if dtype.is_complex else (numel,)
        values = torch.randn(shape, generator=generator, dtype=real) * 8
        return torch.view_as_complex(values) if dtype.is_complex else values.to(dtype)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw % 2 == 1 if dtype is torch.bool else raw.view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(bits(first), bits(second))


@attrs.frozen(eq=False)
class Job:
    """The work of every rank: tensors, request and expected outputs."""

    request: Request
    inputs: list[list[torch.Tensor]]
    outputs: list[list[torch.Tensor]]
    expected: list[list[torch.Tensor]]
    reduction: Reduction | None = None


def run(algorithm: Algorithm, job: Job, schedules: Sequence[Schedule] | None = None, repeat: int = 1) -> int:
    """Run a job on as many threads as ranks; return how many messages it took."""
    world_size = len(job.inputs)
    office = PostOffice(world_size)
    dtype = next(tensor.dtype for tensors in job.inputs for tensor in tensors)
    info = [GroupInfo("g", "g", "", "socket", rank, tuple(range(world_size))) for rank in range(world_size)]

    def rank_body(rank: int) -> None:
        request = request_of(job, rank)
        schedule = schedules[rank] if schedules else algorithm.schedule(rank, request)
        inputs, outputs = job.inputs[rank], job.outputs[rank]
        program = program_of(
            office.endpoints[rank],
            schedule,
            dtype,
            job.reduction,
            [each.numel() for each in inputs],
            [each.numel() for each in outputs],
            request.shift(rank),
        )
        signature = Signature(job.request.kind, info[rank])
        for seq in range(1, repeat + 1):
            operation = Operation(signature, seq, 0, deadline_in(20), False)
            program(operation, inputs, outputs)

    with ThreadPoolExecutor(world_size) as pool:
        for future in [pool.submit(rank_body, rank) for rank in range(world_size)]:
            future.result()
    return office.messages


def program_of(
    endpoint: FabricEndpoint,
    schedule: Schedule,
    dtype: torch.dtype,
    reduction: Reduction | None,
    inputs: Sequence[int],
    outputs: Sequence[int],
    shift: int | None = 0,
) -> MessageProgram:
    """Return a program for lists of tensors with these numbers of elements."""
    layout = Layout(Parts(tuple(inputs), single=False), Parts(tuple(outputs), single=False), dtype)
    folds = {
        final: Folding.of(reduction, dtype, endpoint.world_size, final)
        for final in (True, False)
        if reduction is not None
    }
    plan = message_plan(endpoint.rank, layout, folds, schedule, shift=shift)
    return MessageProgram(MessageHost(endpoint), plan)


def request_of(job: Job, rank: int) -> Request:
    if job.request.family is not OpKind.ALL_TO_ALL:
        return job.request
    counts = [[part.numel() for part in parts] for parts in job.inputs]
    return attrs.evolve(job.request, counts=tuple(counts[rank]), received=tuple(row[rank] for row in counts))


def assert_outputs(job: Job) -> None:
    for rank, (outputs, expected) in enumerate(zip(job.outputs, job.expected, strict=True)):
        for place, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
            assert same(found, wanted), f"rank {rank}, tensor {place}: {found} is not {wanted}"


Maker = Callable[[int, int, torch.dtype, Reduction | None, bool], Job]


def part_sizes(world_size: int, size: int) -> list[int]:
    return [(5 * rank + size) % (size + 2) for rank in range(world_size)]


def vectors(world_size: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [example(size, dtype, seed=rank) for rank in range(world_size)]


def all_reduce_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    reduction = reduction or SUM
    given = vectors(world_size, size, dtype)
    expected = reduced(given, reduction)
    inputs = [[prepare(tensor, reduction)] for tensor in given]
    outputs = inputs if in_place else [[torch.zeros_like(tensor)] for tensor in given]
    request = Request(OpKind.ALL_REDUCE, world_size, (size,), exact=is_exact(reduction, dtype))
    return Job(request, inputs, outputs, [[expected]] * world_size, reduction)


def reduce_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    job = all_reduce_job(world_size, size, dtype, reduction, in_place)
    root = size % world_size
    request = attrs.evolve(job.request, kind=OpKind.REDUCE, root=root)
    outputs = [tensors if rank == root else [] for rank, tensors in enumerate(job.outputs)]
    expected = [tensors if rank == root else [] for rank, tensors in enumerate(job.expected)]
    return attrs.evolve(job, request=request, outputs=outputs, expected=expected)


def reduce_scatter_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    reduction = reduction or SUM
    counts = part_sizes(world_size, size)
    given = vectors(world_size, sum(counts), dtype)
    expected = [[part] for part in reduced(given, reduction).split(counts)]
    inputs = [[prepare(tensor, reduction)] for tensor in given]
    outputs = [
        [list(inputs[rank][0].split(counts))[rank] if in_place else torch.zeros(counts[rank], dtype=dtype)]
        for rank in range(world_size)
    ]
    request = Request(OpKind.REDUCE_SCATTER, world_size, tuple(counts), exact=is_exact(reduction, dtype))
    return Job(request, inputs, outputs, expected, reduction)


def broadcast_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    tensors = [[tensor] for tensor in vectors(world_size, size, dtype)]
    root = size % world_size
    expected = [[tensors[root][0].clone()]] * world_size
    return Job(Request(OpKind.BROADCAST, world_size, (size,), root=root), tensors, tensors, expected)


def all_gather_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    counts = part_sizes(world_size, size)
    parts = [example(count, dtype, seed=rank) for rank, count in enumerate(counts)]
    outputs = [[torch.zeros(count, dtype=dtype) for count in counts] for _ in range(world_size)]
    inputs = [[part] for part in parts]
    if in_place:
        for rank, part in enumerate(parts):
            outputs[rank][rank] = part
    expected = [[part.clone() for part in parts]] * world_size
    return Job(Request(OpKind.ALL_GATHER, world_size, tuple(counts)), inputs, outputs, expected)


def gather_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    job = all_gather_job(world_size, size, dtype, reduction, in_place)
    root = size % world_size
    return attrs.evolve(
        job,
        request=attrs.evolve(job.request, kind=OpKind.GATHER, root=root),
        outputs=[tensors if rank == root else [] for rank, tensors in enumerate(job.outputs)],
        expected=[tensors if rank == root else [] for rank, tensors in enumerate(job.expected)],
    )


def scatter_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    counts, root = part_sizes(world_size, size), size % world_size
    parts = [example(count, dtype, seed=rank) for rank, count in enumerate(counts)]
    outputs = [[torch.zeros_like(part)] for part in parts]
    if in_place:
        outputs[root] = [parts[root]]
    expected = [[part.clone()] for part in parts]
    inputs = [parts if rank == root else [] for rank in range(world_size)]
    return Job(Request(OpKind.SCATTER, world_size, tuple(counts), root=root), inputs, outputs, expected)


def all_to_all_job(
    world_size: int, size: int, dtype: torch.dtype, reduction: Reduction | None, in_place: bool
) -> Job:
    inputs = [
        [
            example((3 * src + 5 * dst + size) % (size + 2), dtype, seed=src * world_size + dst)
            for dst in range(world_size)
        ]
        for src in range(world_size)
    ]
    expected = [[inputs[src][dst] for src in range(world_size)] for dst in range(world_size)]
    outputs = [[torch.zeros_like(part) for part in parts] for parts in expected]
    return Job(Request(OpKind.ALL_TO_ALL, world_size), inputs, outputs, expected)


JOBS: dict[OpKind, Maker] = {
    OpKind.ALL_REDUCE: all_reduce_job,
    OpKind.REDUCE: reduce_job,
    OpKind.REDUCE_SCATTER: reduce_scatter_job,
    OpKind.BROADCAST: broadcast_job,
    OpKind.ALL_GATHER: all_gather_job,
    OpKind.GATHER: gather_job,
    OpKind.SCATTER: scatter_job,
    OpKind.ALL_TO_ALL: all_to_all_job,
}
MOVING = [each for each in MESSAGES if each.family in JOBS and "reduce" not in each.family.value]
REDUCING = [each for each in MESSAGES if "reduce" in each.family.value]
ORDERED = [each for each in REDUCING if each.ordered]


@pytest.mark.parametrize("algorithm", MOVING, ids=name_of)
def test_moves_of_every_dtype_at_many_world_sizes(algorithm: Algorithm) -> None:
    dtypes = itertools.cycle(EVERY_DTYPE)
    for world_size in range(1, 10):
        for size, in_place in ((0, False), (5, True), (23, False)):
            job = JOBS[algorithm.family](world_size, size, next(dtypes), None, in_place)
            run(algorithm, job)
            assert_outputs(job)


@pytest.mark.parametrize("algorithm", REDUCING, ids=name_of)
def test_exact_reductions_at_many_world_sizes(algorithm: Algorithm) -> None:
    cases = itertools.cycle(
        [
            (torch.int32, SUM),
            (torch.bfloat16, MAX),
            (torch.uint8, AVG),
            (torch.uint32, kind_of("MIN")),
            (torch.bool, kind_of("BXOR")),
        ]
    )
    for world_size in worlds_of(algorithm, range(1, 10)):
        for size, in_place in ((0, False), (7, True), (23, False)):
            dtype, reduction = next(cases)
            job = JOBS[algorithm.family](world_size, size, dtype, reduction, in_place)
            run(algorithm, job)
            assert_outputs(job)


@pytest.mark.parametrize("algorithm", ORDERED, ids=name_of)
def test_inexact_reductions_come_out_bitwise_as_in_one_process(algorithm: Algorithm) -> None:
    cases = itertools.cycle(itertools.product((*FLOATS, *COMPLEX), (SUM, AVG, kind_of("PRODUCT"))))
    for world_size in range(1, 10):
        for size, in_place in ((7, True), (23, False), (12, True)):
            dtype, reduction = next(cases)
            if dtype.is_complex and reduction.kind is ReduceKind.PRODUCT:
                continue  # excepted: vector and scalar code round differently
            job = JOBS[algorithm.family](world_size, size, dtype, reduction, in_place)
            run(algorithm, job)
            assert_outputs(job)


@pytest.mark.parametrize("algorithm", [each for each in REDUCING if not each.ordered], ids=name_of)
def test_inexact_reductions_in_any_order_are_close_and_equal_everywhere(algorithm: Algorithm) -> None:
    for world_size, reduction in itertools.product(worlds_of(algorithm, (3, 4, 6, 8)), (SUM, AVG)):
        job = JOBS[algorithm.family](world_size, 41, torch.float64, reduction, True)
        run(algorithm, attrs.evolve(job, request=attrs.evolve(job.request, deterministic=False)))
        for outputs, expected in zip(job.outputs, job.expected, strict=True):
            for found, wanted in zip(outputs, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        if algorithm.family is OpKind.ALL_REDUCE:
            assert all(same(outputs[0], job.outputs[0][0]) for outputs in job.outputs)


def test_every_element_is_the_same_wherever_it_stands() -> None:
    """A permuted vector gives the permuted result: no value depends on its chunk."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    for name in ("direct", "whole", "bruck"):
        algorithm = algorithm_named(OpKind.ALL_REDUCE, name)
        plain = all_reduce_job(5, 50, torch.float32, SUM, in_place=False)
        run(algorithm, plain)
        permuted = attrs.evolve(
            plain,
            inputs=[[tensors[0][order]] for tensors in plain.inputs],
            outputs=[[torch.zeros(50)] for _ in range(5)],
        )
        run(algorithm, permuted)
        assert same(permuted.outputs[3][0], plain.outputs[0][0][order])


@pytest.mark.parametrize("algorithm", MESSAGES, ids=name_of)
def test_lists_of_tensors_are_one_concatenation_cut_anywhere(algorithm: Algorithm) -> None:
    """Each rank cuts its tensors at other places; the result is that of the concatenation."""
    if algorithm.family is OpKind.BARRIER:
        return
    world_size = worlds_of(algorithm, (4, 5))[-1]
    job = JOBS[algorithm.family](world_size, 23, torch.int32, None, False)

    def cut(tensors: Tensors, rank: int) -> list[torch.Tensor]:
        flat = torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=torch.int32)
        return [piece.clone() for piece in flat.split(3 + rank)] if tensors else []

    inputs = [cut(tensors, rank) for rank, tensors in enumerate(job.inputs)]
    outputs = [cut(tensors, 2 * rank) for rank, tensors in enumerate(job.outputs)]
    if job.inputs is job.outputs:
        outputs = inputs
    pieces = attrs.evolve(job, inputs=inputs, outputs=outputs)
    schedules = [algorithm.schedule(rank, request_of(job, rank)) for rank in range(world_size)]
    run(algorithm, pieces, schedules)
    for found, wanted in zip(outputs, job.expected, strict=True):
        assert same(torch.cat(found or [torch.empty(0)]), torch.cat(wanted or [torch.empty(0)]))


def test_repeated_calls_reuse_plan_and_scratch() -> None:
    job = all_reduce_job(4, 1000, torch.int64, SUM, in_place=False)
    run(algorithm_named(OpKind.ALL_REDUCE, "direct"), job, repeat=5)
    assert_outputs(job)


def test_tensors_that_require_grad_are_written() -> None:
    job = all_reduce_job(3, 10, torch.float32, SUM, in_place=True)
    for (tensor,) in job.inputs:
        tensor.requires_grad_()
    run(algorithm_named(OpKind.ALL_REDUCE, "direct"), job)
    assert all(tensor.requires_grad for (tensor,) in job.outputs)
    for (tensor,), (wanted,) in zip(job.outputs, job.expected, strict=True):
        assert same(tensor.detach(), wanted)


def test_shapes_do_not_matter() -> None:
    job = all_reduce_job(3, 24, torch.float32, SUM, in_place=True)
    cubes = [[tensors[0].view(2, 3, 4)] for tensors in job.inputs]
    run(algorithm_named(OpKind.ALL_REDUCE, "direct"), attrs.evolve(job, inputs=cubes, outputs=cubes))
    assert_outputs(job)


def test_a_barrier_takes_its_empty_messages() -> None:
    algorithm = algorithm_named(OpKind.BARRIER, "dissemination")
    request = Request(OpKind.BARRIER, 5)
    nothing: list[list[torch.Tensor]] = [[torch.empty(0, dtype=torch.uint8)]] + [[] for _ in range(4)]
    assert run(algorithm, Job(request, nothing, nothing, nothing)) == 5 * 3


def test_messages_match_in_order_between_two_ranks() -> None:
    swap = Schedule(
        (
            Exchange(
                (Send(1, source(0, 1)), Send(1, source(1, 2))), (Recv(1, target(1, 2)), Recv(1, target(0, 1)))
            ),
        )
    )
    other = Schedule(
        (
            Exchange(recvs=(Recv(0, scratch(0, 1)),)),
            Exchange(recvs=(Recv(0, target(1, 2)),)),
            Exchange(sends=(Send(0, source(0, 1)), Send(0, source(1, 2)))),
        ),
        scratch=1,
    )
    values = [[torch.tensor([1, 2])], [torch.tensor([3, 4])]]
    outputs = [[torch.zeros(2, dtype=torch.int64)] for _ in range(2)]
    job = Job(Request(OpKind.BROADCAST, 2, (2,)), values, outputs, [])
    run(algorithm_named(OpKind.BROADCAST, "binomial"), job, [swap, other])
    assert outputs[0][0].tolist() == [4, 3]
    assert outputs[1][0].tolist() == [0, 2]


def lonely_operation(kind: OpKind, deadline_ns: int) -> Operation:
    info = GroupInfo("g", "g", "", "socket", 0, (0, 1))
    return Operation(Signature(kind, info), 1, 0, deadline_ns, False)


def test_a_missing_rank_is_a_timeout_that_names_it() -> None:
    office = PostOffice(2)
    schedule = algorithm_named(OpKind.ALL_REDUCE, "direct").schedule(0, Request(OpKind.ALL_REDUCE, 2, (4,)))
    program = program_of(office.endpoints[0], schedule, torch.float32, SUM, [4], [4])
    tensor = torch.ones(4)
    with pytest.raises(OperationTimeoutError) as caught:
        program(lonely_operation(OpKind.ALL_REDUCE, deadline_in(0.05)), [tensor], [tensor])
    assert caught.value.missing == (1,)


def test_what_was_posted_is_cancelled_when_posting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    office = PostOffice(2)
    endpoint = office.endpoints[0]

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint, "send", interrupted)
    schedule = algorithm_named(OpKind.ALL_REDUCE, "direct").schedule(0, Request(OpKind.ALL_REDUCE, 2, (4,)))
    program = program_of(endpoint, schedule, torch.float32, SUM, [4], [4])
    tensor = torch.ones(4)
    with pytest.raises(KeyboardInterrupt):
        program(lonely_operation(OpKind.ALL_REDUCE, FOREVER_NS), [tensor], [tensor])
    assert [transfer.peer for transfer in endpoint.cancelled] == [1]


def test_without_a_board_there_is_no_other_slot() -> None:
    steps = (Fence(), Copy(target(0, 4), slot(1, 0, 4)))
    program = program_of(PostOffice(2).endpoints[0], Schedule(steps, slot=4), torch.float32, None, [], [4])
    with pytest.raises(ValueError, match="names a rank that is no member"):
        program(lonely_operation(OpKind.BROADCAST, FOREVER_NS), [], [torch.zeros(4)])


def test_a_message_stays_inside_the_tensors() -> None:
    schedule = Schedule((Exchange(recvs=(Recv(1, target(0, 5)),)),))
    with pytest.raises(ValueError, match="receives to outside"):
        program_of(PostOffice(2).endpoints[0], schedule, torch.float32, None, [], [4])
