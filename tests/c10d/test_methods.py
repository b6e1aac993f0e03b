"""c10d's spellings: each gives the result of the modern call, in c10d's form."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs
import pytest
import torch
from support.ranks import TENANTS, run_ranks
from support.torch_features import has
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from dist2 import InvalidUsageError, ProcessGroup, ReduceOp, Work

INPROC = TENANTS[0]
WORLD = 2
LIMIT = timedelta(seconds=10)
Tensors = list[torch.Tensor]


def value(rank: int, numel: int = 4) -> torch.Tensor:
    """Return a rank's contribution."""
    return torch.arange(1.0, numel + 1) * (rank + 1)


def blank(count: int = WORLD, numel: int = 4) -> Tensors:
    return [torch.zeros(numel) for _ in range(count)]


def opts(kind: Any, asynchronous: bool, **fields: Any) -> Any:
    """Return options as torch's C++ passes them: a timeout of -1 ms."""
    made = kind()
    made.asyncOp = asynchronous
    assert made.timeout == timedelta(milliseconds=-1)
    for name, given in fields.items():
        setattr(made, name, given)
    return made


@attrs.frozen
class Op:
    """One operation in the modern spelling and in c10d's.

    Attributes:
        modern: Runs it and returns its outputs.
        spellings: By name: each runs one c10d call and returns its Work and its outputs.
        options: The type of its options; each spelling gets options of it.
    """

    modern: Callable[[ProcessGroup], Tensors]
    options: Any
    fields: dict[str, Any]
    with_options: dict[str, Callable[[Any, Any], tuple[Work, Tensors]]]
    without: dict[str, Callable[[Any], tuple[Work, Tensors]]]


def written(call: Callable[..., Work], tensors: Tensors, *args: Any, **keywords: Any) -> tuple[Work, Tensors]:
    return call(*args, **keywords), tensors


def _in_place(pg: ProcessGroup, call: Callable[[torch.Tensor], Work]) -> tuple[Work, Tensors]:
    mine = value(pg.rank())
    return call(mine), [mine]


def _out(outputs: Tensors, call: Callable[[Tensors], Work]) -> tuple[Work, Tensors]:
    return call(outputs), outputs


def _modern(run: Callable[[ProcessGroup], tuple[Work, Tensors]]) -> Callable[[ProcessGroup], Tensors]:
    def modern(pg: ProcessGroup) -> Tensors:
        work, tensors = run(pg)
        assert work.is_completed()
        return tensors

    return modern


def _outs_at(pg: ProcessGroup, root: int) -> Tensors:
    return blank() if pg.rank() == root else []


def _ins_at(pg: ProcessGroup, root: int) -> Tensors:
    return [value(5 + rank) for rank in range(WORLD)] if pg.rank() == root else []


def _lists(tensors: Tensors) -> list[Tensors]:
    return [tensors] if tensors else []


def parts(pg: ProcessGroup) -> Tensors:
    return [value(pg.rank() + 3 * rank) for rank in range(WORLD)]


MAX, SUM = ReduceOp.MAX, ReduceOp.SUM

OPS: dict[str, Op] = {
    "all_reduce": Op(
        _modern(lambda pg: _in_place(pg, lambda t: pg.all_reduce(t, MAX))),
        c10d.AllreduceOptions,
        {"reduceOp": MAX},
        {
            "list, opts": lambda pg, o: _in_place(pg, lambda t: pg.allreduce([t], o)),
            "keywords": lambda pg, o: _in_place(pg, lambda t: pg.allreduce(tensors=[t], opts=o)),
        },
        {
            "tensor": lambda pg: _in_place(pg, lambda t: pg.allreduce(t, MAX)),
            "tensor, timeout": lambda pg: _in_place(pg, lambda t: pg.allreduce(t, MAX, LIMIT)),
            "tensor, keywords": lambda pg: _in_place(
                pg, lambda t: pg.allreduce(tensor=t, op=MAX, timeout=LIMIT)
            ),
            "list": lambda pg: _in_place(pg, lambda t: pg.allreduce([t], op=MAX)),
        },
    ),
    "all_reduce_coalesced": Op(
        _modern(lambda pg: _in_place(pg, lambda t: pg.all_reduce_coalesced([t], MAX))),
        c10d.AllreduceCoalescedOptions,
        {"reduceOp": MAX},
        {
            "list, opts": lambda pg, o: _in_place(pg, lambda t: pg.allreduce_coalesced([t], o)),
            "keywords": lambda pg, o: _in_place(pg, lambda t: pg.allreduce_coalesced(tensors=[t], opts=o)),
        },
        {},
    ),
    "broadcast": Op(
        _modern(lambda pg: _in_place(pg, lambda t: pg.broadcast(t, 1))),
        c10d.BroadcastOptions,
        {"rootRank": 1},
        {
            "list, opts": lambda pg, o: _in_place(pg, lambda t: pg.broadcast([t], o)),
            "keywords": lambda pg, o: _in_place(pg, lambda t: pg.broadcast(tensors=[t], opts=o)),
        },
        {"list": lambda pg: _in_place(pg, lambda t: pg.broadcast([t], 1))},
    ),
    "reduce": Op(
        _modern(lambda pg: _in_place(pg, lambda t: pg.reduce(t, 1, MAX))),
        c10d.ReduceOptions,
        {"rootRank": 1, "reduceOp": MAX},
        {
            "list, opts": lambda pg, o: _in_place(pg, lambda t: pg.reduce([t], o)),
            "keywords": lambda pg, o: _in_place(pg, lambda t: pg.reduce(tensors=[t], opts=o)),
        },
        {"list": lambda pg: _in_place(pg, lambda t: pg.reduce([t], 1, MAX))},
    ),
    "all_gather": Op(
        _modern(lambda pg: _out(blank(), lambda out: pg.all_gather(out, value(pg.rank())))),
        AllgatherOptions,
        {},
        {
            "lists, opts": lambda pg, o: _out(
                blank(), lambda out: pg.allgather([out], [value(pg.rank())], o)
            ),
            "keywords": lambda pg, o: _out(
                blank(),
                lambda out: pg.allgather(output_tensors=[out], input_tensors=[value(pg.rank())], opts=o),
            ),
        },
        {
            "list, tensor": lambda pg: _out(blank(), lambda out: pg.allgather(out, value(pg.rank()), LIMIT)),
            "list, keywords": lambda pg: _out(
                blank(),
                lambda out: pg.allgather(output_tensors=out, input_tensor=value(pg.rank()), timeout=LIMIT),
            ),
        },
    ),
    "all_gather_single": Op(
        _modern(lambda pg: _out(blank(1, 8), lambda out: pg.all_gather_single(out[0], value(pg.rank())))),
        AllgatherOptions,
        {},
        {
            "opts": lambda pg, o: _out(
                blank(1, 8), lambda out: pg.all_gather_single(out[0], value(pg.rank()), o)
            ),
            "opts by name": lambda pg, o: _out(
                blank(1, 8), lambda out: pg.all_gather_single(output=out[0], input=value(pg.rank()), opts=o)
            ),
            "_allgather_base": lambda pg, o: _out(
                blank(1, 8), lambda out: pg._allgather_base(out[0], value(pg.rank()), o)
            ),
            "coalesced": lambda pg, o: _out(
                blank(1, 8), lambda out: pg.all_gather_single_coalesced(out, [value(pg.rank())], o)
            ),
            "allgather_into_tensor_coalesced": lambda pg, o: _out(
                blank(1, 8), lambda out: pg.allgather_into_tensor_coalesced(out, [value(pg.rank())], opts=o)
            ),
        },
        {
            "_allgather_base": lambda pg: _out(
                blank(1, 8), lambda out: pg._allgather_base(out[0], value(pg.rank()))
            ),
            "allgather_into_tensor_coalesced": lambda pg: _out(
                blank(1, 8), lambda out: pg.allgather_into_tensor_coalesced(out, [value(pg.rank())])
            ),
        },
    ),
    "reduce_scatter": Op(
        _modern(lambda pg: _out(blank(1), lambda out: pg.reduce_scatter(out[0], parts(pg), MAX))),
        c10d.ReduceScatterOptions,
        {"reduceOp": MAX},
        {
            "lists, opts": lambda pg, o: _out(blank(1), lambda out: pg.reduce_scatter(out, [parts(pg)], o)),
            "keywords": lambda pg, o: _out(
                blank(1),
                lambda out: pg.reduce_scatter(output_tensors=out, input_tensors=[parts(pg)], opts=o),
            ),
        },
        {"lists": lambda pg: _out(blank(1), lambda out: pg.reduce_scatter(out, [parts(pg)], MAX))},
    ),
    "reduce_scatter_single": Op(
        _modern(
            lambda pg: _out(blank(1), lambda out: pg.reduce_scatter_single(out[0], torch.cat(parts(pg)), MAX))
        ),
        c10d.ReduceScatterOptions,
        {"reduceOp": MAX},
        {
            "opts": lambda pg, o: _out(
                blank(1), lambda out: pg.reduce_scatter_single(out[0], torch.cat(parts(pg)), o)
            ),
            "keywords": lambda pg, o: _out(
                blank(1),
                lambda out: pg.reduce_scatter_single(
                    outputTensor=out[0], inputTensor=torch.cat(parts(pg)), opts=o
                ),
            ),
            "_reduce_scatter_base": lambda pg, o: _out(
                blank(1),
                lambda out: pg._reduce_scatter_base(
                    outputTensor=out[0], inputTensor=torch.cat(parts(pg)), opts=o
                ),
            ),
            "one by name": lambda pg, o: _out(
                blank(1),
                lambda out: pg._reduce_scatter_base(out[0], inputTensor=torch.cat(parts(pg)), opts=o),
            ),
            "coalesced": lambda pg, o: _out(
                blank(1), lambda out: pg.reduce_scatter_single_coalesced(out, [torch.cat(parts(pg))], o)
            ),
            "reduce_scatter_tensor_coalesced": lambda pg, o: _out(
                blank(1), lambda out: pg.reduce_scatter_tensor_coalesced(out, [torch.cat(parts(pg))], o)
            ),
        },
        {},
    ),
    "gather": Op(
        _modern(lambda pg: _out(_outs_at(pg, 1), lambda out: pg.gather(out, value(pg.rank()), 1))),
        c10d.GatherOptions,
        {"rootRank": 1},
        {
            "lists, opts": lambda pg, o: _out(
                _outs_at(pg, 1), lambda out: pg.gather(_lists(out), [value(pg.rank())], o)
            ),
            "an empty list inside": lambda pg, o: _out(
                _outs_at(pg, 1), lambda out: pg.gather([out], [value(pg.rank())], o)
            ),
            "keywords": lambda pg, o: _out(
                _outs_at(pg, 1),
                lambda out: pg.gather(output_tensors=_lists(out), input_tensors=[value(pg.rank())], opts=o),
            ),
        },
        {},
    ),
    "scatter": Op(
        _modern(lambda pg: _out(blank(1), lambda out: pg.scatter(out[0], _ins_at(pg, 1), 1))),
        c10d.ScatterOptions,
        {"rootRank": 1},
        {
            "lists, opts": lambda pg, o: _out(
                blank(1), lambda out: pg.scatter(out, _lists(_ins_at(pg, 1)), o)
            ),
            "keywords": lambda pg, o: _out(
                blank(1),
                lambda out: pg.scatter(output_tensors=out, input_tensors=[_ins_at(pg, 1)], opts=o),
            ),
        },
        {},
    ),
    "all_to_all": Op(
        _modern(lambda pg: _out(blank(), lambda out: pg.all_to_all(out, parts(pg)))),
        c10d.AllToAllOptions,
        {},
        {
            "lists, opts": lambda pg, o: _out(blank(), lambda out: pg.alltoall(out, parts(pg), o)),
            "keywords": lambda pg, o: _out(
                blank(), lambda out: pg.alltoall(output_tensors=out, input_tensors=parts(pg), opts=o)
            ),
        },
        {"lists": lambda pg: _out(blank(), lambda out: pg.alltoall(out, parts(pg)))},
    ),
    "all_to_all_single": Op(
        _modern(
            lambda pg: _out(
                blank(1, 8), lambda out: pg.all_to_all_single(out[0], torch.cat(parts(pg)), [4, 4], [4, 4])
            )
        ),
        c10d.AllToAllOptions,
        {},
        {
            "opts": lambda pg, o: _out(
                blank(1, 8),
                lambda out: pg.all_to_all_single(out[0], torch.cat(parts(pg)), [4, 4], [4, 4], o),
            ),
            "no splits": lambda pg, o: _out(
                blank(1, 8), lambda out: pg.all_to_all_single(out[0], torch.cat(parts(pg)), [], [], opts=o)
            ),
            "alltoall_base": lambda pg, o: _out(
                blank(1, 8), lambda out: pg.alltoall_base(out[0], torch.cat(parts(pg)), [4, 4], [4, 4], o)
            ),
            "keywords": lambda pg, o: _out(
                blank(1, 8),
                lambda out: pg.alltoall_base(
                    output=out[0],
                    input=torch.cat(parts(pg)),
                    output_split_sizes=[],
                    input_split_sizes=[],
                    opts=o,
                ),
            ),
        },
        {
            "alltoall_base": lambda pg: _out(
                blank(1, 8),
                lambda out: pg.alltoall_base(out[0], torch.cat(parts(pg)), [4, 4], [4, 4], LIMIT),
            )
        },
    ),
    "barrier": Op(
        _modern(lambda pg: _out([], lambda _: pg.barrier())),
        c10d.BarrierOptions,
        {},
        {
            "opts": lambda pg, o: _out([], lambda _: pg.barrier(o)),
            "opts by name": lambda pg, o: _out([], lambda _: pg.barrier(opts=o)),
        },
        {},
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_a_c10d_call_does_what_the_modern_one_does(name: str) -> None:
    op = OPS[name]

    def body(pg: ProcessGroup) -> None:
        expected = op.modern(pg)
        for spelling, call in op.with_options.items():
            for asynchronous in (True, False):
                work, tensors = call(pg, opts(op.options, asynchronous, **op.fields))
                assert work.operation.is_async == asynchronous, spelling
                assert asynchronous or work.is_completed(), spelling
                assert work.wait()
                assert all(map(torch.equal, tensors, expected)), f"{spelling}: {tensors} != {expected}"
        for spelling, old in op.without.items():
            work, tensors = old(pg)
            assert work.operation.is_async, spelling
            work.wait()
            assert all(map(torch.equal, tensors, expected)), f"{spelling}: {tensors} != {expected}"

    run_ranks(WORLD, body, INPROC)


def test_a_timeout_in_options_counts() -> None:
    def body(pg: ProcessGroup) -> None:
        limited = opts(c10d.AllreduceOptions, False)
        assert pg.allreduce([torch.ones(2)], limited).operation.timeout_s == pytest.approx(pg.timeout_s)
        limited.timeout = timedelta(seconds=7)
        assert pg.allreduce([torch.ones(2)], limited).operation.timeout_s == pytest.approx(7)
        assert pg.barrier(timeout=LIMIT).operation.timeout_s == pytest.approx(10)

    run_ranks(WORLD, body, INPROC)


def test_calls_of_the_object_api() -> None:
    """The calls that torch's own tests of its object API make, in the same spelling."""

    def body(pg: ProcessGroup) -> None:
        me, both = pg.rank(), range(WORLD)
        t = torch.full((10,), float(me))
        pg.allreduce(t, op=SUM, timeout=LIMIT).wait()
        assert torch.equal(t, torch.full((10,), 1.0))
        pg.barrier(timeout=LIMIT).wait()
        t = torch.full((3,), float(me))
        pg.broadcast(t, root=0, timeout=LIMIT).wait()
        assert torch.equal(t, torch.zeros(3))
        outs = blank(2, 1)
        pg.allgather(outs, torch.tensor([float(me)]), timeout=LIMIT).wait()
        assert [out.item() for out in outs] == [0.0, 1.0]
        outs = blank(2, 1) if me == 0 else []
        pg.gather(outs, torch.tensor([float(me)]), root=0, timeout=LIMIT).wait()
        assert [out.item() for out in outs] == ([0.0, 1.0] if me == 0 else [])
        out = torch.zeros(1)
        ins = [torch.tensor([10.0 + rank]) for rank in both] if me == 0 else []
        pg.scatter(out, ins, root=0, timeout=LIMIT).wait()
        assert out.item() == 10.0 + me
        t = torch.ones(1)
        pg.reduce(t, root=0, op=SUM, timeout=LIMIT).wait()
        assert t.item() == (2.0 if me == 0 else 1.0)
        pg.reduce_scatter(out, [torch.tensor([1.0 + rank]) for rank in both], op=SUM, timeout=LIMIT).wait()
        assert out.item() == 2.0 * (1 + me)
        received = torch.zeros(2)
        pg.all_to_all_single(
            received, torch.tensor([0.0, 1.0]) + 2 * me, [1, 1], [1, 1], timeout=LIMIT
        ).wait()
        assert received.tolist() == [float(me), 2.0 + me]
        pg.alltoall_base(received, torch.tensor([5.0, 6.0]), [1, 1], [1, 1], timeout=LIMIT).wait()
        assert received.tolist() == [5.0 + me] * 2

    run_ranks(WORLD, body, INPROC)


def test_positional_order_is_outputs_first_then_root_then_op() -> None:
    def body(pg: ProcessGroup) -> None:
        t = value(pg.rank())
        pg.reduce(t, 1, MAX, LIMIT)
        assert torch.equal(t, value(pg.rank()))
        t = value(pg.rank())
        pg.broadcast(t, 1, LIMIT)
        assert torch.equal(t, value(1))
        whole = torch.zeros(8)
        pg.all_gather_single(whole, value(pg.rank()), LIMIT)
        assert torch.equal(whole, torch.cat([value(0), value(1)]))
        part = torch.zeros(4)
        pg.reduce_scatter_single(part, whole, MAX, LIMIT)
        assert torch.equal(part, value(pg.rank()))

    run_ranks(WORLD, body, INPROC)


def test_all_gather_of_uneven_sizes_in_the_old_name() -> None:
    def body(pg: ProcessGroup) -> None:
        outs = [torch.zeros(1), torch.zeros(3)]
        pg.allgather([outs], [torch.full((1 + 2 * pg.rank(),), 7.0 + pg.rank())]).wait()
        assert torch.equal(outs[0], torch.full((1,), 7.0))
        assert torch.equal(outs[1], torch.full((3,), 8.0))

    run_ranks(WORLD, body, INPROC)


@pytest.mark.parametrize("asynchronous", [None, True, False])
def test_allgather_coalesced(asynchronous: bool | None) -> None:
    def body(pg: ProcessGroup) -> None:
        lists = [[torch.zeros(4), torch.zeros(2)] for _ in range(WORLD)]
        mine = [value(pg.rank()), value(pg.rank(), 2)]
        extra = [] if asynchronous is None else [opts(AllgatherOptions, asynchronous)]
        work = pg.allgather_coalesced(lists, mine, *extra)
        assert asynchronous is not False or work.is_completed()
        work.wait()
        for rank, row in enumerate(lists):
            assert torch.equal(row[0], value(rank))
            assert torch.equal(row[1], value(rank, 2))
        pg.allgather_coalesced(output_lists=lists, input_list=mine).wait()
        with pytest.raises(InvalidUsageError, match="outputs must hold one tensor for each"):
            pg.allgather_coalesced(lists[:1], mine)
        pg.barrier()  # it is not collecting any more
        assert pg.allreduce(torch.ones(1)).wait()

    run_ranks(WORLD, body, INPROC)


def test_messages_in_lists_are_asynchronous() -> None:
    """Crossing sends of large tensors, as `torch.distributed.isend` issues them, do not deadlock."""

    def body(pg: ProcessGroup) -> None:
        other, numel = 1 - pg.rank(), 400_000
        got = torch.zeros(numel)
        sending = pg.send([torch.full((numel,), float(pg.rank()))], other, 3)
        receiving = pg.recv([got], other, 3)
        assert sending.operation.is_async
        assert receiving.operation.is_async
        receiving.wait()
        sending.wait()
        assert torch.equal(got, torch.full((numel,), float(other)))
        c10ds: Any = pg
        sending = c10ds.send(tensors=[torch.ones(2)], dstRank=other, tag=4)
        c10ds.recv(tensors=[got[:2]], srcRank=other, tag=4).wait()
        sending.wait()
        sending = pg.send([torch.full((2,), 9.0)], other, 5)
        work = pg.recv_anysource([got[:2]], 5)
        assert work.source_rank() == work._source_rank() == other
        assert got[0].item() == 9.0
        sending.wait()

    run_ranks(WORLD, body, INPROC)


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "two tensors": (lambda pg: pg.allreduce([torch.ones(1), torch.ones(1)]), "tensor must hold exactly one"),
    "no tensor": (lambda pg: pg.broadcast([], c10d.BroadcastOptions()), "tensor must hold exactly one"),
    "two lists": (
        lambda pg: pg.allgather([blank(), blank()], [torch.ones(4)]),
        "outputs must hold exactly one",
    ),
    "no options": (lambda pg: pg.allreduce(torch.ones(1), opts=3), "opts must be c10d options, got 3"),
    "too many": (
        lambda pg: pg.barrier(None, None, None, opts=c10d.BarrierOptions()),
        "got 3 positional arguments",
    ),
    "twice": (lambda pg: pg.allreduce(torch.ones(1), tensors=[torch.ones(1)]), "got tensor twice"),
    "root": (
        lambda pg: pg.broadcast([torch.ones(1)], opts(c10d.BroadcastOptions, True, rootRank=9)),
        "got 9",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_c10d_calls(name: str) -> None:
    call, message = WRONG[name]

    def body(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError, match=message):
            call(pg)
        pg.barrier()

    run_ranks(WORLD, body, INPROC)


ROOTED: dict[str, Callable[..., object]] = {
    "broadcast": lambda pg, **root: pg.broadcast(torch.ones(1), **root).operation.signature.root,
    "reduce": lambda pg, **root: pg.reduce(torch.ones(1), **root).operation.signature.root,
    "gather": lambda pg, **root: (
        pg.gather(
            list(torch.ones(WORLD, 1)) if pg.rank() == 1 else None, torch.ones(1), **root
        ).operation.signature.root
    ),
    "scatter": lambda pg, **root: (
        pg.scatter(
            torch.ones(1), [torch.ones(1)] * WORLD if pg.rank() == 1 else None, **root
        ).operation.signature.root
    ),
    "broadcast_object": lambda pg, **root: pg.broadcast_object(pg.rank(), **root),
    "gather_object": lambda pg, **root: 1 if (pg.gather_object(0, **root) is None) != (pg.rank() == 1) else 0,
    "scatter_object": lambda pg, **root: pg.scatter_object([1] * WORLD if pg.rank() == 1 else None, **root),
}


@pytest.mark.parametrize("name", ROOTED)
def test_a_root_may_be_spelled_as_in_torch_distributed(name: str) -> None:
    torchs = "dst" if name.startswith(("reduce", "gather")) else "src"

    def body(pg: ProcessGroup) -> None:
        for keyword in ("root", torchs):
            assert ROOTED[name](pg, **{keyword: 1}) == 1
        with pytest.raises(TypeError, match="got root twice: 1 and"):
            ROOTED[name](pg, **{"root": 1, torchs: 1})
        with pytest.raises(TypeError, match="dst" if torchs == "src" else "src"):
            ROOTED[name](pg, **{"dst" if torchs == "src" else "src": 1})
        pg.barrier()

    run_ranks(WORLD, body, INPROC)


def test_an_unknown_keyword_is_not_dropped() -> None:
    def body(pg: ProcessGroup) -> None:
        calls: list[Any] = [pg.allreduce, pg.broadcast]
        for call in calls:
            with pytest.raises(TypeError, match="colour"):
                call([torch.ones(1)], colour=1)

    run_ranks(WORLD, body, INPROC)


def test_what_torch_asks_a_group_for() -> None:
    def body(pg: ProcessGroup) -> None:
        cpu = torch.device("cpu")
        assert pg._device_types == [cpu]
        assert pg.name() == "socket"
        assert pg._get_backend_name() == "gloo"  # to torch: its tensors are on CPUs
        assert pg.bound_device_id is None
        assert ProcessGroup.unbox(pg.boxed()) is pg
        assert pg.getGroupName() == pg.group_name
        assert pg.getGroupDesc() == pg.group_desc == ""
        assert pg.getSize() == pg.size() == WORLD
        pg._set_group_desc("mesh")
        assert pg.group_desc == "mesh"
        pg.set_timeout(timedelta(seconds=41))
        backend = pg._get_backend(cpu)
        assert backend.options._timeout == timedelta(seconds=41)
        if has("options"):
            assert backend.options.global_ranks_in_group == [0, 1]
        assert (backend.name(), backend.rank(), backend.size()) == ("socket", pg.rank(), WORLD)
        assert backend.supports_splitting and backend.supports_coalescing and not backend.supports_shrinking
        assert not (backend.supports_time_estimate or backend._supports_time_estimate)
        assert not backend.supports_tensor_alloc(cpu)
        backend.eager_connect_single_device(cpu)
        assert backend.allreduce([torch.ones(1)], c10d.AllreduceOptions()).wait()
        with pytest.raises(InvalidUsageError, match="'cuda'"):
            pg._get_backend(torch.device("cuda"))
        with pytest.raises(AttributeError, match="suspend"):
            backend.suspend()
        pg._set_sequence_number_for_group()
        before = pg._get_sequence_number_for_group()
        pg.barrier()
        assert pg._get_sequence_number_for_group() == before + 1
        pg._enable_collectives_timing()
        store = pg.get_group_store()
        store.set(f"from {pg.rank()}", "here")
        assert store.get(f"from {1 - pg.rank()}") == b"here"
        pg._wait_for_pending_works()

    run_ranks(WORLD, body, INPROC)


def test_c10d_coalescing() -> None:
    def body(pg: ProcessGroup) -> None:
        cpu = torch.device("cpu")
        one, two = torch.ones(2), torch.ones(3)
        pg._start_coalescing(cpu)
        pg.allreduce([one], c10d.AllreduceOptions())
        pg.broadcast([two], c10d.BroadcastOptions())
        assert torch.equal(one, torch.ones(2))
        work = pg._end_coalescing(cpu)
        work.wait()
        assert torch.equal(one, torch.full((2,), 2.0))
        pg._start_coalescing(device_type=cpu)
        assert pg._end_coalescing(device_type=cpu).wait()
        with pytest.raises(InvalidUsageError, match="not inside a coalescing block"):
            pg._end_coalescing(cpu)

    run_ranks(WORLD, body, INPROC)


@pytest.mark.filterwarnings("error")
def test_torch_sets_the_timeout_of_a_group() -> None:
    def body(pg: ProcessGroup) -> None:
        c10d._world.pg_map.setdefault(pg, ("dist2", pg.get_group_store()))
        try:
            getattr(c10d, "set_timeout", c10d._set_pg_timeout)(timedelta(seconds=7), pg)
        finally:
            del c10d._world.pg_map[pg]
        assert pg.timeout_s == 7
        assert pg._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)

    run_ranks(1, body, INPROC)
