"""Works without references are reused, and only those."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

import dist2
from dist2 import InvalidUsageError, ProcessGroup
from dist2.operation.work import Work


@pytest.fixture
def pg() -> Iterator[ProcessGroup]:
    """Yield a group of one, with no reusable Works other than the test's."""
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        taken = [pg.barrier() for _ in range(16)]
        yield pg
        del taken


def test_a_work_that_was_dropped_is_used_again(pg: ProcessGroup) -> None:
    work = pg.barrier()
    first = id(work)
    del work
    taken = pg.all_reduce(torch.ones(2))
    assert id(taken) == first
    assert taken.operation.seq == pg._runner.queue.seq and len(taken.outputs) == 1
    assert gc.is_tracked(taken)


def test_what_it_held_is_let_go(pg: ProcessGroup) -> None:
    tensor = torch.ones(2)
    work = pg.all_reduce(tensor)
    first, held = id(work), weakref.ref(tensor)
    del work, tensor
    assert held() is None
    assert id(pg.barrier()) == first


def test_a_work_that_somebody_has_is_left_alone(pg: ProcessGroup) -> None:
    tensors = [torch.full((1,), float(number)) for number in range(20)]
    works = [pg.all_reduce(tensor) for tensor in tensors]
    assert len({id(work) for work in works}) == len(works)
    assert [work.result()[0].item() for work in works] == list(map(float, range(20)))
    last = pg._runner.queue.seq
    assert [work.operation.seq for work in works] == list(range(last - 19, last + 1))


def test_a_work_whose_other_half_is_taken_is_left_to_it(pg: ProcessGroup) -> None:
    tensor = torch.ones(3)
    work = pg.all_reduce(tensor)
    box = work.boxed()
    assert Work.unbox(box) is work
    del work
    later = [pg.barrier() for _ in range(4)]
    assert all(Work.unbox(box) is not each for each in later)
    boxes = [each.boxed() for each in later]
    assert [Work.unbox(each) for each in boxes] == later
    del box  # its half goes as it would have


def test_one_that_was_watched_is_not_used_again(pg: ProcessGroup) -> None:
    gone: list[str] = []
    work = pg.barrier()
    reference = weakref.ref(work, lambda _: gone.append("gone"))
    del work
    assert gone == ["gone"]
    later = pg.barrier()
    assert reference() is None
    assert weakref.getweakrefcount(later) == 0


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
    assert type(pg.barrier()) is Work


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


def test_a_failed_call_returns_none_to_use_again(pg: ProcessGroup) -> None:
    with pytest.raises(InvalidUsageError, match="timeout must be positive"):
        pg.all_reduce(torch.ones(1), timeout=-1.0)
    before = pg._runner.queue.seq
    assert pg.all_reduce(torch.ones(1), timeout=5).operation.timeout_s == 5
    assert pg._runner.queue.seq == before + 1  # a call that was refused has no number


def test_futures_of_used_again_works_are_their_own(pg: ProcessGroup) -> None:
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


def test_the_process_ends_well_with_works_kept() -> None:
    program = (
        "import dist2, torch\n"
        "pg = dist2.new_group('fake', store=dist2.HashStore(), rank=0, world_size=1)\n"
        "works = [pg.all_reduce(torch.ones(1)) for _ in range(20)]\n"
        "del works\n"
        "pg.barrier()\n"
        "pg.shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, b"")
