"""`torch.compile` of functions that call groups: dist2's methods are not traced."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.processes import Crew
from support.training import WORLD, alone, close, compiling, mesh_of, model, quiet, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dist2
from dist2 import ProcessGroup, Store, Work
from dist2.c10d.backend import _OF_THE_GROUP

Run = Callable[..., list[Any]]
Call = Callable[[Any, torch.Tensor], object]
CPU = torch.device("cpu")

GROUP_CALLS: dict[str, Call] = {
    "abort": lambda pg, x: pg.abort(),
    "agree": lambda pg, x: pg.agree(1),
    "all_gather": lambda pg, x: pg.all_gather([x], x + 1),
    "all_gather_object": lambda pg, x: pg.all_gather_object("said"),
    "all_gather_single": lambda pg, x: pg.all_gather_single(x, x + 1),
    "all_gather_single_coalesced": lambda pg, x: pg.all_gather_single_coalesced([x], [x + 1]),
    "all_gather_v": lambda pg, x: pg.all_gather_v([x], x + 1),
    "all_reduce": lambda pg, x: pg.all_reduce(x),
    "all_reduce_coalesced": lambda pg, x: pg.all_reduce_coalesced([x, x + 1]),
    "all_to_all": lambda pg, x: pg.all_to_all([x], [x + 1]),
    "all_to_all_single": lambda pg, x: pg.all_to_all_single(x, x + 1),
    "allgather": lambda pg, x: pg.allgather([[x]], [x + 1]).wait(),
    "allgather_coalesced": lambda pg, x: pg.allgather_coalesced([[x]], [x + 1]).wait(),
    "allgather_into_tensor_coalesced": lambda pg, x: pg.allgather_into_tensor_coalesced([x], [x + 1]).wait(),
    "allreduce": lambda pg, x: pg.allreduce([x]).wait(),
    "allreduce_coalesced": lambda pg, x: pg.allreduce_coalesced([x]).wait(),
    "alltoall": lambda pg, x: pg.alltoall([x], [x + 1]).wait(),
    "alltoall_base": lambda pg, x: pg.alltoall_base(x, x + 1, [], []).wait(),
    "barrier": lambda pg, x: pg.barrier(),
    "broadcast": lambda pg, x: pg.broadcast(x, 0),
    "broadcast_object": lambda pg, x: pg.broadcast_object("said", 0),
    "coalescing": lambda pg, x: pg.coalescing(),
    "gather": lambda pg, x: pg.gather([x], x + 1, 0),
    "gather_object": lambda pg, x: pg.gather_object("said", 0),
    "gather_into_tensor": lambda pg, x: pg.gather_into_tensor(x, x + 1).wait(),
    "gather_single": lambda pg, x: pg.gather_single(x, x + 1).wait(),
    "getGroupDesc": lambda pg, x: pg.getGroupDesc(),
    "getGroupName": lambda pg, x: pg.getGroupName(),
    "getSize": lambda pg, x: pg.getSize(),
    "get_backend": lambda pg, x: pg.get_backend("cpu").name(),
    "get_error": lambda pg, x: pg.get_error(),
    "get_group_store": lambda pg, x: pg.get_group_store(),
    "get_reconfigure_handle": lambda pg, x: pg.get_reconfigure_handle(),
    "global_rank": lambda pg, x: pg.global_rank(0),
    "group_rank": lambda pg, x: pg.group_rank(0),
    "handle": lambda pg, x: pg.handle(),
    "irecv": lambda pg, x: (pg.isend(x + 1, 0), pg.irecv(x, 0).wait()),
    "isend": lambda pg, x: (pg.isend(x, 0), pg.recv(x, 0)),
    "merge_remote_group": lambda pg, x: pg.merge_remote_group(dist2.HashStore(), 1).shutdown(),
    "monitored_barrier": lambda pg, x: pg.monitored_barrier(),
    "name": lambda pg, x: pg.name(),
    "new_window": lambda pg, x: pg.new_window(x),
    "queued": lambda pg, x: pg.queued(),
    "rank": lambda pg, x: pg.rank(),
    "reconfigure": lambda pg, x: pg.reconfigure("u", [pg.handle()]).shutdown(),
    "recv": lambda pg, x: (pg.isend(x + 1, 0), pg.recv(x, 0)),
    "recv_anysource": lambda pg, x: (pg.isend(x + 1, 0), pg.recv_anysource([x], 0).wait()),
    "recv_object": lambda pg, x: (pg.isend(x, 0), pg.recv(x, 0), pg.recv_object),
    "reduce": lambda pg, x: pg.reduce(x, 0),
    "reduce_scatter": lambda pg, x: pg.reduce_scatter(x, [x + 1]),
    "reduce_scatter_single": lambda pg, x: pg.reduce_scatter_single(x, x + 1),
    "reduce_scatter_single_coalesced": lambda pg, x: pg.reduce_scatter_single_coalesced([x], [x + 1]),
    "reduce_scatter_tensor_coalesced": lambda pg, x: pg.reduce_scatter_tensor_coalesced([x], [x + 1]).wait(),
    "reduce_scatter_v": lambda pg, x: pg.reduce_scatter_v(x, [x + 1]),
    "register_abort_hook": lambda pg, x: pg.register_abort_hook(1, print),
    "register_completion_hook": lambda pg, x: pg.register_completion_hook(print),
    "register_post_hook": lambda pg, x: pg.register_post_hook(1, print),
    "register_pre_hook": lambda pg, x: pg.register_pre_hook(print),
    "revoke": lambda pg, x: pg.revoke(),
    "scatter": lambda pg, x: pg.scatter(x, [x + 1], 0),
    "scatter_object": lambda pg, x: pg.scatter_object(["said"], 0),
    "send": lambda pg, x: (pg.irecv(x, 0), pg.send(x + 1, 0)),
    "send_object": lambda pg, x: pg.send_object,
    "setGroupDesc": lambda pg, x: pg.setGroupDesc("new"),
    "setGroupName": lambda pg, x: pg.setGroupName("new"),
    "set_timeout": lambda pg, x: pg.set_timeout(5),
    "shrink": lambda pg, x: pg.shrink([]),
    "shutdown": lambda pg, x: pg.shutdown(),
    "size": lambda pg, x: pg.size(),
    "split": lambda pg, x: pg.split([0]).shutdown(),
    "split_by": lambda pg, x: pg.split_by(0).shutdown(),
    "split_group": lambda pg, x: pg.split_group([0]).shutdown(),
    # Names with an underscore that torch calls, and properties
    "_allgather_base": lambda pg, x: pg._allgather_base(x, x + 1).wait(),
    "_get_backend": lambda pg, x: pg._get_backend(CPU).name(),
    "_start_coalescing": lambda pg, x: (
        pg._start_coalescing(CPU),
        pg.allreduce([x]),
        pg._end_coalescing(CPU).wait(),
    ),
    "getBackendName": lambda pg, x: pg.getBackendName(),
    "group_name": lambda pg, x: pg.group_name,
    "timeout_s": lambda pg, x: x.add_(pg.timeout_s),
    "waited_ns": lambda pg, x: pg.waited_ns(),
}
"""Methods that torch inherits from its own class are not checked: these are the methods that dist2 defines.
"""

WORK_CALLS: dict[str, Call] = {
    "add_done_callback": lambda work, x: work.add_done_callback(lambda: None),
    "block_current_stream": lambda work, x: work.block_current_stream(),
    "exception": lambda work, x: work.exception(),
    "get_future": lambda work, x: work.get_future().wait(),
    "get_future_result": lambda work, x: work.get_future_result().wait(),
    "is_completed": lambda work, x: work.is_completed(),
    "is_success": lambda work, x: work.is_success(),
    "result": lambda work, x: x.add_(work.result()[0]),
    "source_rank": lambda work, x: work.source_rank(),
    "synchronize": lambda work, x: work.synchronize(),
    "wait": lambda work, x: work.wait(),
}

STORE_CALLS: dict[str, Call] = {
    "add": lambda store, x: store.add("count", 1),
    "append": lambda store, x: store.append("key", "more"),
    "check": lambda store, x: store.check(["key"]),
    "clone": lambda store, x: store.clone(),
    "close": lambda store, x: store.close(),
    "compare_set": lambda store, x: store.compare_set("key", "", "value"),
    "deleteKey": lambda store, x: store.deleteKey("key"),
    "delete_key": lambda store, x: store.delete_key("key"),
    "fetch": lambda store, x: store.fetch(["key"]),
    "get": lambda store, x: store.get("key"),
    "getNumKeys": lambda store, x: store.getNumKeys(),
    "has_extended_api": lambda store, x: store.has_extended_api(),
    "list_keys": lambda store, x: store.list_keys(),
    "multi_get": lambda store, x: store.multi_get(["key"]),
    "multi_set": lambda store, x: store.multi_set(["key"], ["value"]),
    "num_keys": lambda store, x: store.num_keys(),
    "queue_len": lambda store, x: store.queue_len("queue"),
    "queue_pop": lambda store, x: (store.queue_push("queue", "value"), store.queue_pop("queue")),
    "queue_push": lambda store, x: store.queue_push("queue", "value"),
    "set": lambda store, x: store.set("key", "value"),
    "set_timeout": lambda store, x: store.set_timeout(3),
    "wait": lambda store, x: store.wait(["key"]),
}


def public_methods(kind: type, own: str = "dist2") -> set[str]:
    """Return the names of the methods that a class has from dist2."""
    classes = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == own]
    names = {name for each in classes for name in vars(each) if not name.startswith("_")}
    return {name for name in names if callable(inspect.getattr_static(kind, name))}


def test_every_method_is_tried() -> None:
    """New methods must be entered above; `note_server` and `refused` are for dist2's own use."""
    assert public_methods(ProcessGroup) - set(GROUP_CALLS) == set()
    assert public_methods(Work) - set(WORK_CALLS) == set()
    assert public_methods(Store) - set(STORE_CALLS) <= {"barrier", "note_server", "refused"}
    assert {"allreduce", "broadcast"} <= _OF_THE_GROUP


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Drop compiled functions; torch warns about code that it cannot compile."""
    with compiling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        torch._dynamo.reset()


@pytest.fixture
def pg() -> Iterator[ProcessGroup]:
    with dist2.new_group("socket", 20, store=dist2.HashStore(), rank=0, world_size=1) as pg:
        yield pg


def outcome(call: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Return the result of a call on a tensor, or the type of its error."""
    try:
        return call(torch.ones(2)).tolist()
    except dist2.Dist2Error as error:
        return type(error)


def same_compiled(make: Callable[[], Any], call: Call) -> None:
    """Check that a compiled function that calls an object has the same result as without compilation."""

    def function_of(subject: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            call(subject, y)
            return y + 1

        return function

    expected = outcome(function_of(make()))
    compiled = torch.compile(function_of(make()), backend="aot_eager")
    assert outcome(compiled) == expected


@pytest.mark.parametrize("name", GROUP_CALLS)
def test_a_compiled_function_calls_a_group(name: str) -> None:
    made: list[ProcessGroup] = []

    def make() -> ProcessGroup:
        made.append(dist2.new_group("socket", 20, store=dist2.HashStore(), rank=0, world_size=1))
        return made[-1]

    try:
        same_compiled(make, GROUP_CALLS[name])
    finally:
        for group in made:
            group.abort()


@pytest.mark.parametrize("name", WORK_CALLS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_compiled_function_asks_a_work(name: str, asynchronous: bool, pg: ProcessGroup) -> None:
    same_compiled(lambda: pg.all_reduce(torch.ones(2), async_op=asynchronous), WORK_CALLS[name])


@pytest.mark.parametrize("name", STORE_CALLS)
def test_a_compiled_function_uses_a_store(name: str) -> None:
    def make() -> Store:
        store = dist2.HashStore()
        store.set("key", "value")
        return store

    same_compiled(make, STORE_CALLS[name])


def test_a_compiled_function_sees_that_a_group_has_changed(pg: ProcessGroup) -> None:
    compiled = torch.compile(lambda x: x + pg.timeout_s, backend="aot_eager")
    assert compiled(torch.zeros(1)).item() == 20
    pg.set_timeout(7)
    assert compiled(torch.zeros(1)).item() == 7


def test_legacy_calls_in_a_compiled_function() -> None:
    dist = dist2.legacy
    dist.init_process_group("socket", store=dist2.HashStore(), rank=0, world_size=1)
    try:

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            dist.all_reduce(y)
            dist.barrier()
            return y + dist.get_world_size()

        assert torch.compile(step, backend="aot_eager")(torch.ones(2)).tolist() == [4, 4]
    finally:
        dist.destroy_process_group()


def test_a_call_that_would_break_a_whole_graph_says_what_to_call(pg: ProcessGroup) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        dist2.legacy.all_reduce(x, group=pg)
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call dist2\.functional or torch's functional"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(2))


# Modules on two ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a callable that calls ``body(pg, *arguments)`` on two ranks, in processes that are kept."""
    crew = Crew(WORLD, tmp_path_factory.mktemp("crew"))
    yield functools.partial(crew.run, timeout=25.0)
    crew.close()


def _ddp(pg: ProcessGroup, inside: bool) -> None:
    class Buffered(nn.Module):
        """Has a buffer, which rank 0 sends before each step: from C++."""

        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.steps = nn.Buffer(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            answer: torch.Tensor = self.net(x)
            return answer

    with quiet(pg if inside else None):
        net = DistributedDataParallel(Buffered(), process_group=pg)
        compiled: Any = torch.compile(net, backend="aot_eager")
        train(compiled, pg.rank())
    close([parameter.detach() for parameter in net.parameters()], alone())
    torch._dynamo.reset()


@pytest.mark.parametrize("inside", [False, True], ids=["a group", "the default group"])
def test_ddp_compiled(run: Run, inside: bool) -> None:
    run(_ddp, inside)


def _fsdp2(pg: ProcessGroup) -> None:
    from torch.distributed.fsdp import fully_shard

    with quiet(pg):
        net: Any = model()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh_of(pg))
        fully_shard(net, mesh=mesh_of(pg))
        compiled: Any = torch.compile(net, backend="aot_eager")
        train(compiled, pg.rank())
        whole = [parameter.full_tensor().detach() for parameter in net.parameters()]
    close(whole, alone())
    torch._dynamo.reset()


def test_fsdp2_compiled(run: Run) -> None:
    run(_fsdp2)
