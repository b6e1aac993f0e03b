"""Works: of Python, and with a half in C++ for calls by the names of c10d."""

from __future__ import annotations

import gc
import resource
import subprocess
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from support.warm_interpreter import whole_python

import dist2
from dist2 import ProcessGroup
from dist2.operation.cpp_work import CppWork, whole
from dist2.operation.work import Work


@pytest.fixture
def pg() -> Iterator[ProcessGroup]:
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        yield pg


def test_it_is_a_work_in_every_respect(pg: ProcessGroup) -> None:
    tensor = torch.ones(2)
    work = pg.all_reduce(tensor)
    assert type(work) is Work
    assert isinstance(work, Work) and isinstance(work, torch.distributed.Work)
    assert work.wait() and work.wait(timeout=1) and work.is_completed() and work.is_success()
    assert work.exception() is None and work.helper is None
    assert work.result() == [tensor] and work.get_future().wait() == [tensor]
    assert work.get_future_result().wait() == 0
    called: list[bool] = []
    work.add_done_callback(lambda: called.append(True))
    work.synchronize()
    work.block_current_stream()
    assert called == [True]
    assert work.source_rank() == -1 and work._get_op_type() == whole(work)._get_op_type()
    assert repr(work) == repr(whole(work))
    assert work.timeout == timedelta(seconds=pg._runner.timeout_s)
    for name in {each for each in vars(torch.distributed.Work) if not each.startswith("_pybind11_")}:
        assert hasattr(work, name), name
    with pytest.raises(AttributeError, match="nothing"):
        getattr(work, "nothing")  # noqa: B009 - no attribute of a Work


def test_one_that_was_not_initialised_says_so() -> None:
    unset = CppWork.__new__(CppWork)
    with pytest.raises(AttributeError, match="work"):
        unset.is_completed()
    with pytest.raises(AttributeError, match="work"):
        unset.outputs  # noqa: B018 - read


def test_calls_by_the_names_of_c10d_return_works_for_cpp(pg: ProcessGroup) -> None:
    tensor = torch.ones(2)
    options = torch.distributed.BroadcastOptions()
    options.asyncOp = False
    for work in (pg.broadcast([tensor], options), pg.broadcast(tensor, options), pg.allreduce([tensor])):
        work.wait()
        assert type(work) is CppWork and isinstance(work, Work)
        assert type(CppWork.unbox(work.boxed())) is CppWork


def test_what_it_held_is_let_go(pg: ProcessGroup) -> None:
    tensor = torch.ones(2)
    work = pg.all_reduce(tensor)
    held = weakref.ref(tensor)
    del work, tensor
    assert held() is None


def test_a_work_that_somebody_has_is_left_alone(pg: ProcessGroup) -> None:
    tensors = [torch.full((1,), float(number)) for number in range(20)]
    works = [pg.all_reduce(tensor) for tensor in tensors]
    assert len({id(work) for work in works}) == len(works)
    assert [work.result()[0].item() for work in works] == list(map(float, range(20)))
    last = pg._runner.queue.seq
    assert [work.operation.seq for work in works] == list(range(last - 19, last + 1))


def test_kinds_of_work_are_taken_down_whole(pg: ProcessGroup) -> None:
    class Kind(Work):
        pass

    tensor = torch.ones(1)
    held = weakref.ref(tensor)
    kind = Kind(pg.barrier().operation, (tensor,))
    kind.note = tensor  # type: ignore[attr-defined]  # a note of the test's
    seen = weakref.ref(kind)
    del kind, tensor
    assert seen() is None and held() is None


def test_a_cycle_through_a_work_is_collected(pg: ProcessGroup) -> None:
    class Tagged(torch.Tensor):
        pass

    tensor = torch.ones(1).as_subclass(Tagged)
    work = pg.all_reduce(tensor)
    work.outputs = (tensor, work)  # type: ignore[assignment]  # a cycle
    seen = weakref.ref(work)
    del work, tensor
    gc.collect()
    assert seen() is None


def test_futures_are_their_own(pg: ProcessGroup) -> None:
    def future(value: float) -> torch.futures.Future[list[torch.Tensor]]:
        return pg.all_reduce(torch.full((1,), value)).get_future()

    futures = [future(float(number)) for number in range(4)]
    assert [each.wait()[0].item() for each in futures] == [0.0, 1.0, 2.0, 3.0]


def test_memory_stays_the_same(pg: ProcessGroup) -> None:
    tensor = torch.ones(2)
    for _ in range(20_000):
        pg.all_reduce(tensor)
        pg.all_reduce(tensor).boxed()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50_000):
        pg.all_reduce(tensor)
        pg.all_reduce(tensor).boxed()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2048


def test_the_process_ends_well_with_works() -> None:
    program = (
        "import dist2, torch, warnings\n"
        "warnings.simplefilter('error')\n"
        "pg = dist2.new_group('fake', store=dist2.HashStore(), rank=0, world_size=1)\n"
        "works = [pg.all_reduce(torch.ones(1)) for _ in range(20)]\n"
        "del works\n"
        "pg.barrier()\n"
        "pg.shutdown()\n"
    )
    done = subprocess.run([*whole_python(), "-c", program], capture_output=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, b"")
