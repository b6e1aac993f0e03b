"""Backends by name: custom ones, torch's, and groups that their owners forgot."""

from __future__ import annotations

import itertools
import subprocess
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.ranks import Tenant, run_ranks
from support.warm_interpreter import whole_python
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo

import dist2
from dist2 import InvalidUsageError, ProcessGroup, UnknownBackendError, legacy
from dist2.backends.base import Backend, GroupSpec
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.store import HashStore

_numbers = itertools.count()


def fresh() -> str:
    """Return a name that no other test has registered."""
    return f"custom-{next(_numbers)}"


def open_alone(name: str, **options: Any) -> Any:
    return dist2.new_group(name, 5, store=HashStore(), rank=0, world_size=1, **options)


class Doubling(Backend):
    """A world of one, whose sums are doubled so that they show."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        self.closed = 0

    def all_reduce(self, operation: Operation, inputs: Any, outputs: Any) -> None:
        outputs[0].detach().mul_(2)

    def broadcast(self, operation: Operation, inputs: Any, outputs: Any) -> None:
        pass

    def all_gather(self, operation: Operation, inputs: Any, outputs: Any) -> None:
        outputs[0].detach().copy_(inputs[0])

    all_to_all = all_gather

    def send(self, operation: Operation, inputs: Any, outputs: Any) -> None:
        pass

    def recv(self, operation: Operation, inputs: Any, outputs: Any) -> None:
        operation.source = 0

    def shutdown(self) -> None:
        self.closed += 1

    def abort(self) -> None:
        pass


@pytest.mark.parametrize(("name", "options"), [("gloo", {"control": False}), ("fake", {})])
def test_a_backend_says_which_membership_changes_it_lacks(name: str, options: dict[str, object]) -> None:
    with open_alone(name, **options) as pg:
        for call, words in (
            (pg.revoke, "revoke a group"),
            (pg.agree, "agree"),
            (pg.handle, "say how it is reached"),
            (lambda: pg.reconfigure("again", ["me"]), "say how it is reached"),
        ):
            with pytest.raises(InvalidUsageError, match=f"backend '{name}' cannot {words}; 'socket' can"):
                call()


def test_a_backend_of_the_users_has_every_operation() -> None:
    name = fresh()
    seen: dict[str, Any] = {}

    def factory(
        store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **options: Any
    ) -> Any:
        seen.update(options, rank=rank, world_size=world_size, timeout=timeout, device=device)
        info = GroupInfo("custom", "custom", "", name, rank, (0,))
        return Doubling(GroupSpec(info, store, timeout.total_seconds(), device))

    dist2.register_backend(name, factory)
    assert name in dist2.backend_names()
    pg = open_alone(name, colour="red")
    assert seen == {
        "colour": "red",
        "rank": 0,
        "world_size": 1,
        "timeout": timedelta(seconds=5),
        "device": torch.device("cpu"),
    }
    assert pg.name() == name
    t = torch.ones(3)
    pg.all_reduce(t, async_op=True).wait()
    assert torch.equal(t, torch.full((3,), 2.0))
    whole = torch.zeros(3)
    pg.all_gather_single(whole, t)  # missing operations are composed of those that it has
    assert torch.equal(whole, t)
    pg.reduce_scatter_single(whole, t)
    assert torch.equal(whole, t * 2)
    pg.all_to_all_single(whole, t)
    pg.barrier()
    outs = [torch.zeros(3)]
    pg.gather(outs, t)
    pg.scatter(whole, outs)
    pg.reduce(whole)
    assert torch.equal(whole, t * 2)
    assert pg.recv(t, 0).source_rank() == 0
    pg.shutdown()
    pg.shutdown()
    assert pg.backend.closed == 1


def test_a_factory_may_return_a_group_of_torchs() -> None:
    name = fresh()

    def factory(store: Any, rank: int, world_size: int, timeout: timedelta, device: Any) -> TorchProcessGroup:
        pg = TorchProcessGroup(store, rank, world_size)
        gloo = ProcessGroupGloo(store, rank, world_size, timeout)
        pg._register_backend(device, TorchProcessGroup.BackendType.GLOO, gloo)
        return pg

    dist2.register_backend(name, factory)
    pg = open_alone(name)
    assert isinstance(pg, ProcessGroup)
    t = torch.ones(2)
    pg.allreduce([t]).wait()
    pg.all_reduce(t)
    with dist2.process_group(pg):
        assert dist2.current_process_group() is pg
    pg.shutdown()


def plain_gloo(
    store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **options: Any
) -> Any:
    return ProcessGroupGloo(store, rank, world_size, timeout)


def whole_gloo(*arguments: Any, **options: Any) -> TorchProcessGroup:
    store, rank, world_size, *_ = arguments
    pg = TorchProcessGroup(store, rank, world_size)
    pg._set_default_backend(TorchProcessGroup.BackendType.GLOO)
    made = plain_gloo(*arguments, **options)
    pg._register_backend(torch.device("cpu"), TorchProcessGroup.BackendType.GLOO, made)
    return pg


@pytest.mark.parametrize("made", [plain_gloo, whole_gloo])
@pytest.mark.parametrize("control", [True, False])
def test_the_objects_of_torch_that_a_factory_returns_are_wrapped(made: Any, control: bool) -> None:
    name, seen = fresh(), list[Any]()

    def factory(*arguments: Any, **options: Any) -> Any:
        seen.append(options)
        return made(*arguments, **options)

    dist2.register_backend(name, factory)

    def body(pg: ProcessGroup) -> None:
        assert pg.name() == name
        pg.all_reduce(x := torch.ones(2), dist2.ReduceOp.AVG)
        assert x.tolist() == [1, 1]
        with pg.split([1, 0]) as part:
            part.broadcast(x := torch.tensor([float(part.rank())]), 1)
            assert x.item() == 1
        with dist2.process_group(pg):
            legacy.all_reduce(x := torch.ones(2))
            assert x.tolist() == [2, 2]
        if control:
            with pytest.raises(dist2.MismatchError):
                pg.all_reduce(torch.ones(2 + pg.rank()))

    options = {"colour": "red"} | ({} if control else {"control": False})
    run_ranks(2, body, Tenant(name, name, options))
    assert seen == [{"colour": "red"}] * 4


def test_names_are_taken_once() -> None:
    name = fresh()
    dist2.register_backend(name, lambda *_, **__: None)
    for taken in (name, "socket"):
        with pytest.raises(ValueError, match=f"Backend {taken} already registered"):
            dist2.register_backend(taken, lambda *_, **__: None)


def test_bad_registrations() -> None:
    with pytest.raises(InvalidUsageError, match="name must be a non-empty string, got ''"):
        dist2.register_backend("", lambda: None)
    with pytest.raises(InvalidUsageError, match=r"func must be callable, got 3 \(int\)"):
        dist2.register_backend(fresh(), 3)
    name = fresh()
    dist2.register_backend(name, lambda *_, **__: "nonsense")
    with pytest.raises(InvalidUsageError, match="must return a ProcessGroup or a Backend, got str"):
        open_alone(name)


def test_an_unknown_backend_is_told_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*gloo.*socket.*; got 'smoke'") as failure:
        open_alone("smoke")
    assert isinstance(failure.value, UnknownBackendError)


NO_LATE_THREADS = """
import threading
from dist2.runtime import process

def refuse(*args):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def start_no_more(notify=process.start_no_more):
    notify()
    threading._start_new_thread = refuse
process.start_no_more = start_no_more
"""
"""Has any version of Python refuse to start threads while the process ends, as 3.12 and later do."""


FORGOTTEN = """
import threading, warnings
import torch, dist2

warnings.simplefilter("always", ResourceWarning)

stores = {{backend: dist2.HashStore() for backend in {backends}}}
def rank_main(rank, backend):
    asked = dict(store=stores[backend], rank=rank, world_size={world}, name=backend)
    pg = dist2.new_group(backend, 60, **asked{options})
    pg.all_reduce(torch.ones(2), async_op=True).wait()
    if rank == 1:
        pg.irecv(torch.ones(1), 0)  # for ever

from dist2.backends.socket.transport.node import Node
nodes = [Node() for _ in range({world})]
ranks = [(rank, backend) for backend in stores for rank in range({world})]
threads = [threading.Thread(target=rank_main, args=each) for each in ranks]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("the end")
"""


ENDING = """
import threading
import torch, dist2

large, calling = torch.ones(1 << 25), threading.Event()
def call_back():
    calling.set()
    if threading.current_thread().name.startswith("dist2-collectives"):
        for _ in range(5):
            large.add_(1)  # in torch's C++, without the interpreter lock
pg = dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1)
pg.all_reduce(torch.ones(2), async_op=True).add_done_callback(call_back)
assert calling.wait(10)
{end}
"""


RECEIVING = """
import threading
import torch, dist2
from dist2.operation import failures

large, mark, marked = torch.ones(1 << 25), failures.poison, threading.Event()
def slow_mark(tensor):
    marked.set()
    for _ in range(5):
        large.add_(1)  # in torch's C++, without the interpreter lock
    mark(tensor)
failures.poison = slow_mark
store = dist2.HashStore()
def rank_main(rank):
    from dist2.backends.socket.transport.node import Node
    pg = dist2.new_group("socket", store=store, rank=rank, world_size=2, node=Node())
    if rank == 1:
        pg.irecv(torch.ones(1), 0, timeout=0.2)  # nobody waits for it
threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert marked.wait(10)
"""


def test_the_end_of_the_process_waits_for_the_thread_that_ends_messages() -> None:
    ended = subprocess.run(
        [*whole_python(), "-c", NO_LATE_THREADS + RECEIVING], capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("end", ["", "pg.abort()"])
def test_the_end_of_the_process_waits_for_threads_inside_torch(end: str) -> None:
    program = NO_LATE_THREADS + ENDING.format(end=end)
    ended = subprocess.run([*whole_python(), "-c", program], capture_output=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("backends", "world", "options"),
    [(["socket"], 2, ", node=nodes[rank]"), (["socket", "gloo", "fake"], 1, "")],
    ids=str,
)
def test_a_forgotten_group_is_named_at_exit_and_never_hangs(
    backends: list[str], world: int, options: str
) -> None:
    program = NO_LATE_THREADS + FORGOTTEN.format(backends=backends, world=world, options=options)
    ended = subprocess.run(
        [*whole_python(), "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("the end\n")  # torch 2.8's Gloo prints how many peers it has
    for rank, backend in itertools.product(range(world), backends):
        place = f"rank {rank} of {world}, open> was never closed"
        assert f"ResourceWarning: <ProcessGroup '{backend}' {backend} {place}" in ended.stderr
    assert ended.stderr.count("was never closed") == world * len(backends)
    assert "Traceback" not in ended.stderr, ended.stderr
