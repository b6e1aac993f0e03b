"""A program of two ranks on MPI: each function below is a test, which `test_mpi` runs and reads the end of.

mpiexec -n 2 python tests/backends/mpi/job.py
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mpi4py import MPI

import dist2
import dist2.legacy as dist
from dist2 import ProcessGroup
from dist2.group import open_groups


@contextmanager
def group(timeout: float = 20.0) -> Any:
    """Yield a new group, and abort it at the end, as its operations may have failed."""
    pg = dist2.new_group("mpi", timeout)
    try:
        yield pg
    finally:
        pg.abort()


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Return the exception that a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def meet() -> None:
    """Wait for the other rank, but leave it the processor: MPI's own calls poll."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def tells_how_calls_differ() -> None:
    with group() as pg:
        numel = 2 + pg.rank()
        error = raised(dist2.MismatchError, lambda: pg.all_reduce(torch.ones(numel)))
        assert str(error).startswith("shape differs: rank 0 [2], rank 1 [3]"), error
        assert list(error.actual) == [1 - pg.rank()]
        raised(dist2.MismatchError, pg.barrier)
    with group() as pg:
        calls: list[Callable[[], object]] = [pg.barrier, lambda: pg.broadcast(torch.ones(1))]
        error = raised(dist2.MismatchError, calls[pg.rank()])
        assert str(error).startswith("operation differs: rank 0 barrier, rank 1 broadcast"), error


def tells_how_sizes_differ() -> None:
    with group() as pg:
        outputs = [torch.empty(1), torch.empty(2 + pg.rank())]
        mine = outputs[pg.rank()].clone()
        error = raised(dist2.MismatchError, lambda: pg.all_gather_v(outputs, mine))
        assert "shape differs: rank 0 [1], [2], rank 1 [1], [3]" in str(error), error
    for received in (3, 1):  # longer and shorter than the two that arrive
        with group() as pg:
            sent = [torch.ones(2), torch.ones(2)]
            outputs = [torch.zeros(2), torch.zeros(received if pg.rank() == 0 else 2)]
            error = raised(dist2.Dist2Error, lambda o=outputs, s=sent: pg.all_to_all(o, s))
            assert f"rank 1 sends 8 and not {4 * received}" in str(error), error
            assert isinstance(error, dist2.MismatchError) == (pg.rank() == 0), error
            assert all(part.eq(0).all() for part in outputs)


def messages_of_other_sizes_are_refused() -> None:
    for received in (3, 1):
        with group() as pg:
            if pg.rank() == 0:
                pg.send(torch.ones(2), 1)
                continue
            error = raised(dist2.MismatchError, lambda r=received: pg.recv(torch.empty(r), 0))
            assert f"and this rank, rank 1, receives {4 * received} bytes" in str(error), error
            assert list(error.actual) == [0], error.actual


def missing_ranks_are_named() -> None:
    with group(0.3) as pg:
        if pg.rank() == 1:
            MPI.COMM_WORLD.Recv(bytearray(1), source=0)
            return
        error = raised(dist2.OperationTimeoutError, lambda: pg.all_reduce(torch.ones(1)))
        assert error.missing == (1,), error
        MPI.COMM_WORLD.Send(b"x", dest=1)


def either_all_ranks_run_an_operation_or_none() -> None:
    """Also if one comes when the other gives up: a rank alone in MPI's collective would wait for ever."""
    with group() as pg:
        for late_ms in range(98, 103):
            part = pg.split([0, 1], timeout=0.1)
            MPI.COMM_WORLD.Barrier()
            if pg.rank() == 1:
                time.sleep(late_ms / 1000)
            failure = None
            try:
                part.all_reduce(torch.ones(1))
            except dist2.Dist2Error as error:
                failure = error
            part.abort()
            meet()
            ended = MPI.COMM_WORLD.allgather(str(failure))
            assert ended.count("None") in (0, 2), ended


def a_receive_that_times_out_names_the_sender() -> None:
    calls: list[Callable[[ProcessGroup], object]] = [
        lambda pg: pg.recv(torch.zeros(2), 1, timeout=0.2),
        lambda pg: pg.irecv(torch.zeros(2), 1, timeout=0.2).wait(),
    ]
    for call in calls:
        with group() as pg:
            if pg.rank() == 0:
                error = raised(dist2.OperationTimeoutError, lambda c=call, p=pg: c(p))
                assert error.missing == (1,), error
                MPI.COMM_WORLD.Send(b"x", dest=1)
            else:
                MPI.COMM_WORLD.Recv(bytearray(1), source=0)


def abort_frees_a_blocked_caller() -> None:
    with group() as pg:
        if pg.rank() == 1:
            MPI.COMM_WORLD.Recv(bytearray(1), source=0)
            return
        took: list[float] = []

        def stop() -> None:
            time.sleep(0.2)
            took.append(time.monotonic())
            pg.abort()

        thread = threading.Thread(target=stop)
        thread.start()
        raised(dist2.GroupAbortedError, pg.barrier)
        thread.join()
        assert time.monotonic() - took[0] < 5
        MPI.COMM_WORLD.Send(b"x", dest=1)


def survivors_agree_and_go_on() -> None:
    with group() as pg:
        if pg.rank() == 0:
            pg.revoke()
        raised(dist2.GroupRevokedError, lambda: [pg.barrier() for _ in range(1000)])
        assert pg.agree(pg.rank() + 2).flags == 2
        with pg.shrink() as smaller:
            total = torch.ones(3)
            smaller.all_reduce(total)
            assert total.tolist() == [2, 2, 2]


def groups_run_side_by_side() -> None:
    """Each in a thread, so that MPI is called from both at once."""
    with group() as pg:
        parts = [pg.split([0, 1]) for _ in range(2)]
        failures: list[BaseException] = []

        def use(part: ProcessGroup, number: int) -> None:
            try:
                for turn in range(50):
                    total = torch.full((1000,), float(number + turn))
                    work = part.all_reduce(total, async_op=True)
                    part.isend(total.clone(), 1 - part.rank(), number).wait()
                    part.recv(torch.empty(1000), 1 - part.rank(), number)
                    work.wait()
                    assert total[0] == 2 * (number + turn)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=use, args=(part, n)) for n, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        for part in parts:
            part.shutdown()


def arguments_are_checked() -> None:
    raised(dist2.UnknownOptionError, lambda: dist2.new_group("mpi", 10, colour="red"))  # type: ignore[call-overload]
    error = raised(dist2.RendezvousError, lambda: dist2.new_group("mpi", 10, rank=5))
    assert f"rank is {MPI.COMM_WORLD.rank} in the MPI job and given as 5" in str(error), error
    with group() as pg:
        highest = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
        error = raised(dist2.InvalidUsageError, lambda: pg.isend(torch.ones(1), 0, highest + 1))
        assert f"tag must be at most {highest}" in str(error), error


def the_global_api_and_ddp_run_on_it() -> None:
    dist.init_process_group("mpi")
    assert (dist.get_backend(), dist.get_rank()) == ("mpi", MPI.COMM_WORLD.rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(dist.get_rank()))).backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5, 0.5]]
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.destroy_process_group()


def other_backends_meet_over_mpi() -> None:
    with dist2.new_group("socket", 20, init_method="mpi://") as pg:
        total = torch.ones(1)
        pg.all_reduce(total)
        assert (pg.rank(), total.item()) == (MPI.COMM_WORLD.rank, 2)


def a_group_that_is_forgotten_is_left_at_exit() -> None:
    with group() as pg:
        pg.barrier()
        if pg.rank() == 0:
            with pytest.warns(ResourceWarning, match="never closed"):
                open_groups._end_forgotten()
        else:
            assert "rank 0 left the group (its process" in str(raised(dist2.PeerLostError, pg.barrier))


TESTS = (
    tells_how_calls_differ,
    tells_how_sizes_differ,
    messages_of_other_sizes_are_refused,
    missing_ranks_are_named,
    either_all_ranks_run_an_operation_or_none,
    a_receive_that_times_out_names_the_sender,
    abort_frees_a_blocked_caller,
    survivors_agree_and_go_on,
    groups_run_side_by_side,
    arguments_are_checked,
    the_global_api_and_ddp_run_on_it,
    other_backends_meet_over_mpi,
    a_group_that_is_forgotten_is_left_at_exit,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for test in TESTS:
        test()
        meet()
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{test.__name__}\n")
            sys.stdout.flush()
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write("all passed\n")
