"""Calls of the most common form run without Python code, with the same results as the Python methods."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from support.ranks import Tenant, run_ranks
from support.torch_features import needs

from dist2 import InvalidUsageError, ProcessGroup, ReduceOp
from dist2.c10d import fast_methods  # type: ignore[attr-defined]  # compiled, without a stub
from dist2.c10d.methods import Pattern, fast_method
from dist2.group.collectives import Collectives
from dist2.group.point_to_point import PointToPoint

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})

NAMES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_single",
    "reduce_scatter_single",
    "gather",
    "scatter",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "isend",
    "irecv",
)


def calls(pg: ProcessGroup) -> dict[str, Callable[[], torch.Tensor]]:
    """Every operation in its most common form; each returns the tensor that it wrote."""
    rank, size = pg.rank(), pg.size()

    def run(name: str, *args: object, out: torch.Tensor) -> torch.Tensor:
        getattr(pg, name)(*args)
        return out

    def filled(count: int = 4) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32) + 10 * rank

    def to_and_fro() -> torch.Tensor:
        tensor = filled()
        if rank == 0:
            pg.send(tensor, 1)
            pg.recv(tensor, 1)
        elif rank == 1:
            got = torch.zeros(4)
            pg.recv(got, 0)
            pg.send(got + 1, 0)
            return got
        return tensor

    def gathered() -> torch.Tensor:
        outputs = [torch.zeros(4) for _ in range(size)] if rank == 1 else []
        pg.gather(outputs, filled(), 1)
        return torch.cat(outputs) if outputs else torch.zeros(0)

    def scattered() -> torch.Tensor:
        output = torch.zeros(4)
        pg.scatter(output, [filled() + each for each in range(size)] if rank == 1 else [], 1)
        return output

    return {
        "all_reduce": lambda: run("all_reduce", tensor := filled(), out=tensor),
        "broadcast": lambda: run("broadcast", tensor := filled(), 1, out=tensor),
        "reduce": lambda: run("reduce", tensor := filled(), 1, out=tensor),
        "all_gather_single": lambda: run(
            "all_gather_single", output := torch.zeros(4 * size), filled(), out=output
        ),
        "reduce_scatter_single": lambda: run(
            "reduce_scatter_single", output := torch.zeros(4), filled(4 * size), out=output
        ),
        "all_to_all_single": lambda: run(
            "all_to_all_single", output := torch.zeros(4 * size), filled(4 * size), out=output
        ),
        "gather": gathered,
        "scatter": scattered,
        "to and fro": to_and_fro,
    }


def expected(name: str, rank: int, size: int) -> torch.Tensor:
    def filled(of: int, count: int = 4) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32) + 10 * of

    total = sum((filled(each) for each in range(size)), torch.zeros(4))
    whole = sum((filled(each, 4 * size) for each in range(size)), torch.zeros(4 * size))
    everyone = torch.cat([filled(each) for each in range(size)])
    return {
        "all_reduce": total,
        "broadcast": filled(1),
        "reduce": total if rank == 1 else filled(rank),
        "all_gather_single": everyone,
        "reduce_scatter_single": whole[4 * rank : 4 * rank + 4],
        "all_to_all_single": torch.cat(
            [filled(each, 4 * size)[4 * rank : 4 * rank + 4] for each in range(size)]
        ),
        "gather": everyone if rank == 1 else torch.zeros(0),
        "scatter": filled(1) + rank,
        "to and fro": {0: filled(0) + 1, 1: filled(0)}.get(rank, filled(rank)),
    }[name]


def test_the_second_call_gives_what_the_first_gave() -> None:
    def body(pg: ProcessGroup) -> None:
        for _ in range(3):
            for name, call in calls(pg).items():
                assert torch.equal(call(), expected(name, pg.rank(), pg.size())), name
            pg.barrier()

    run_ranks(3, body, INPROC)


@needs("exchange")
def test_a_known_call_runs_no_code_in_python() -> None:
    def body(pg: ProcessGroup) -> None:
        seen: list[str] = []

        def trace(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                seen.append(frame.f_code.co_qualname)

        tensor, parts = torch.ones(4), torch.ones(8)
        methods: list[tuple[Callable[..., object], tuple[object, ...]]] = [
            (pg.all_reduce, (tensor,)),
            (pg.broadcast, (tensor, 0)),
            (pg.reduce, (tensor, 0)),
            (pg.all_gather_single, (parts, tensor)),
            (pg.reduce_scatter_single, (tensor, parts)),
            (pg.all_to_all_single, (torch.zeros(8), parts)),
        ]
        for method, args in methods:
            method(*args)
            seen.clear()
            sys.setprofile(trace)
            method(*args)
            sys.setprofile(None)
            own = [name for name in seen if name.startswith(("Collectives.", "Planning."))]
            assert not own, method

    run_ranks(2, body, INPROC)


@needs("exchange")
def test_messages_run_no_code_in_python_whichever_way_their_peer_is_spelled() -> None:
    def body(pg: ProcessGroup) -> None:
        seen: list[str] = []

        def trace(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                seen.append(frame.f_code.co_qualname)

        tensor, peer = torch.ones(4), 1 - pg.rank()
        first, second = (pg.send, pg.recv) if pg.rank() == 0 else (pg.recv, pg.send)
        name = {pg.send: "dst", pg.recv: "src"}
        for _ in range(2):
            seen.clear()
            sys.setprofile(trace)
            first(tensor, peer)
            second(tensor, peer)
            first(tensor, **{name[first]: peer})
            second(tensor, **{name[second]: peer})
            first(tensor, peer, 3)
            second(tensor, peer, 3)
            sys.setprofile(None)
        assert not [each for each in seen if each.startswith(("PointToPoint.", "OperationRunner."))]
        assert pg.p2p_seq == 12
        sys.setprofile(trace)
        sent = [pg.isend(tensor, peer), pg.isend(tensor, dst=peer), pg.isend(tensor, peer, 3)]
        got = [pg.irecv(tensor, peer), pg.irecv(tensor, src=peer), pg.irecv(tensor, peer, 3)]
        sent += [pg.send(tensor, peer, async_op=True), pg.send(tensor, dst=peer, async_op=True)]
        got += [pg.recv(tensor, peer, async_op=True), pg.recv(tensor, src=peer, async_op=True)]
        sys.setprofile(None)
        assert not [each for each in seen if each.startswith(("PointToPoint.", "OperationRunner.run"))]
        assert pg.p2p_seq == 22
        for work in (*sent, *got):
            assert work.operation.is_async
            work.wait()
        works = [first(tensor, peer), first(tensor, **{name[first]: peer}), first(tensor, peer, 0)]
        assert len({work.operation.signature for work in works}) == 1
        assert first(tensor, peer, 3).operation.signature.tag == 3
        with pytest.raises(InvalidUsageError):
            pg.send(tensor, dst=True)
        with pytest.raises(InvalidUsageError):
            pg.recv(tensor, src=7)
        with pytest.raises(InvalidUsageError):
            pg.send(tensor, peer, False)
        with pytest.raises(InvalidUsageError):
            pg.send(tensor, peer, -1)
        with pytest.raises(TypeError):
            pg.send(tensor, src=peer)  # type: ignore[call-arg]  # wrong, on purpose
        with pytest.raises(TypeError):
            pg.send(tensor, peer, dst=peer)
        with pytest.raises(TypeError):
            pg.isend(tensor, peer, async_op=True)  # type: ignore[call-arg]

    run_ranks(2, body, INPROC)


def test_what_is_not_an_int_is_no_rank() -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch.ones(4)
        pg.broadcast(tensor, 1)
        with pytest.raises(InvalidUsageError):
            pg.broadcast(tensor, True)
        with pytest.raises(InvalidUsageError):
            pg.broadcast(tensor, 1.0)
        with pytest.raises(InvalidUsageError):
            pg.broadcast(tensor, 7)
        pg.barrier()

    run_ranks(2, body, INPROC)


def test_other_spellings_find_the_same_plans() -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch.full((4,), float(pg.rank() + 1))
        pg.all_reduce(tensor)
        pg.all_reduce(tensor, ReduceOp.SUM)
        pg.all_reduce(tensor, op=ReduceOp.SUM)
        pg.all_reduce(tensor, ReduceOp.MAX)
        assert tensor.tolist() == [12.0] * 4
        assert pg.broadcast(tensor, root=0, async_op=True).wait()
        kept = len(pg._runner.plans)
        pg.broadcast(tensor, 0)
        pg.all_reduce(tensor)
        assert len(pg._runner.plans) == kept

    run_ranks(2, body, INPROC)


@pytest.mark.parametrize("name", NAMES)
def test_methods_look_like_those_in_python(name: str) -> None:
    owner = PointToPoint if name in vars(PointToPoint) else Collectives
    method, own = getattr(ProcessGroup, name), getattr(owner, name)
    assert method.__name__ == name
    assert method.__doc__ == own.__doc__
    assert inspect.signature(method) == inspect.signature(own)


def test_arguments_are_checked_and_nothing_leaks() -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch.ones(4)
        for _ in range(50):
            pg.all_reduce(tensor)
            with pytest.raises(TypeError):
                pg.broadcast()  # type: ignore[call-arg]  # wrong, on purpose
            with pytest.raises(InvalidUsageError):
                pg.broadcast("no tensor", 0)
        gc.collect()
        assert sys.getrefcount(tensor) < 30, "the recorder keeps no tensors, and Works that are dropped none"

    run_ranks(1, body, INPROC)
    with pytest.raises(ValueError, match="pattern 99"):
        fast_methods.fast_method(Collectives.barrier, 99, None)
    assert fast_method(Collectives.barrier, Pattern.NOTHING, None) is not None
