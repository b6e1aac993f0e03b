"""Every way into the data plane is marked: code that is not would lose Ctrl-C's protection in silence.

Calls of the public API that run operations are made, and the backend looks at the stack as a signal handler
does. A public name that is in neither table fails, as does code that takes the turn or a lock unmarked.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
from support.instruments import Told, backend_does

import dist2
from dist2 import FileStore, HashStore, PrefixStore, ProcessGroup, Store, TCPStore, legacy
from dist2.backends import mpi, nccl, socket
from dist2.backends.gloo import GlooBackend
from dist2.c10d.backend import BackendView
from dist2.c10d.spellings import INSTEAD
from dist2.group import open_groups
from dist2.operation.coalescing import Batch
from dist2.operation.cpp_work import CppWork
from dist2.operation.signature import Signature
from dist2.runtime.code_marks import codes_of
from dist2.runtime.completion import Completion
from dist2.runtime.signals import (
    CtrlC,
    OnCtrlC,
    ctrl_c_marks,
    defers_ctrl_c,
    inside_library_call,
    lock_marks,
)

Call = Callable[[ProcessGroup], object]

_c10d: Any = torch._C._distributed_c10d


@pytest.fixture
def pg() -> Iterator[ProcessGroup]:
    """Yield a group of two ranks; the other rank makes the same calls."""
    with dist2.new_group("fake", store=HashStore(), rank=0, world_size=2) as pg:
        yield pg


def t() -> torch.Tensor:
    """Return a tensor of a call."""
    return torch.ones(2)


def whole() -> torch.Tensor:
    """Return one as long as those of both ranks."""
    return torch.ones(4)


def two() -> list[torch.Tensor]:
    """Return one for each rank."""
    return [t(), t()]


# Methods that run operations, and methods that do not

OPERATIONS: dict[str, Call] = {
    "all_gather": lambda pg: pg.all_gather(two(), t()),
    "all_gather_object": lambda pg: pg.all_gather_object(1),
    "all_gather_single": lambda pg: pg.all_gather_single(whole(), t()),
    "all_gather_single_coalesced": lambda pg: pg.all_gather_single_coalesced([whole()], [t()]),
    "all_gather_v": lambda pg: pg.all_gather_v(two(), t()),
    "all_reduce": lambda pg: pg.all_reduce(t()),
    "all_reduce_coalesced": lambda pg: pg.all_reduce_coalesced([t()]),
    "all_to_all": lambda pg: pg.all_to_all(two(), two()),
    "all_to_all_single": lambda pg: pg.all_to_all_single(t(), t()),
    "allgather": lambda pg: pg.allgather([two()], [t()]).wait(),
    "allgather_coalesced": lambda pg: pg.allgather_coalesced([[t()], [t()]], [t()]).wait(),
    "allgather_into_tensor_coalesced": lambda pg: pg.allgather_into_tensor_coalesced([whole()], [t()]).wait(),
    "allreduce": lambda pg: pg.allreduce([t()]).wait(),
    "allreduce_coalesced": lambda pg: pg.allreduce_coalesced([t()]).wait(),
    "alltoall": lambda pg: pg.alltoall(two(), two()).wait(),
    "alltoall_base": lambda pg: pg.alltoall_base(t(), t(), [], []).wait(),
    "barrier": lambda pg: pg.barrier(),
    "broadcast": lambda pg: pg.broadcast(t(), 0),
    "broadcast_object": lambda pg: pg.broadcast_object(1, 0),
    "coalescing": lambda pg: coalesced(pg),
    "gather": lambda pg: pg.gather(two(), t(), 0),
    "gather_into_tensor": lambda pg: pg.gather_into_tensor(whole(), t()).wait(),
    "gather_object": lambda pg: pg.gather_object(1, 0),
    "gather_single": lambda pg: pg.gather_single(whole(), t()).wait(),
    "irecv": lambda pg: pg.irecv(t(), 1).wait(),
    "isend": lambda pg: pg.isend(t(), 1).wait(),
    "recv": lambda pg: pg.recv(t(), 1),
    "recv_anysource": lambda pg: pg.recv_anysource([t()], 0).wait(),
    "reduce": lambda pg: pg.reduce(t(), 0),
    "reduce_scatter": lambda pg: pg.reduce_scatter(t(), two()),
    "reduce_scatter_single": lambda pg: pg.reduce_scatter_single(t(), whole()),
    "reduce_scatter_single_coalesced": lambda pg: pg.reduce_scatter_single_coalesced([t()], [whole()]),
    "reduce_scatter_tensor_coalesced": lambda pg: pg.reduce_scatter_tensor_coalesced([t()], [whole()]).wait(),
    "reduce_scatter_v": lambda pg: pg.reduce_scatter_v(t(), two()),
    "scatter": lambda pg: pg.scatter(t(), two(), 0),
    "scatter_object": lambda pg: pg.scatter_object([1, 2], 0),
    "send": lambda pg: pg.send(t(), 1),
    "send_object": lambda pg: pg.send_object(1, 1),
}
"""Methods of a group that run operations."""

WITH_A_PEER = {"recv_object"}
"""Methods that run operations too, with data that a peer has sent."""

NO_OPERATIONS = {
    *(
        "abort",
        "agree",
        "getBackendName",
        "getGroupDesc",
        "getGroupName",
        "getSize",
        "get_error",
        "get_group_store",
    ),
    *("global_rank", "global_ranks", "group_desc", "group_name", "group_rank", "handle", "is_closed"),
    *("merge_remote_group", "monitored_barrier", "name", "p2p_seq", "queued", "rank"),
    *("reconfigure", "get_backend", "get_reconfigure_handle", "supports_reconfigure", "supports_window"),
    *("new_window", "register_abort_hook", "register_post_hook", "register_pre_hook"),
    *("register_completion_hook", "revoke", "setGroupDesc", "setGroupName", "set_timeout", "shrink"),
    *("shutdown", "size", "split", "split_by", "split_group", "timeout_s", "waited_ns"),
}
"""Methods that query, meet through the store, or close: the functions that they call are protected
themselves."""

LEGACY_OPERATIONS: dict[str, Callable[[], object]] = {
    "_all_gather_base": lambda: legacy._all_gather_base(whole(), t()),
    "_coalescing_manager": lambda: legacy_coalesced(),
    "_reduce_scatter_base": lambda: legacy._reduce_scatter_base(t(), whole()),
    "all_gather": lambda: legacy.all_gather(two(), t()),
    "all_gather_coalesced": lambda: legacy.all_gather_coalesced([[t()], [t()]], [t()]),
    "all_gather_into_tensor": lambda: legacy.all_gather_into_tensor(whole(), t()),
    "all_gather_multigpu": lambda: legacy.all_gather_multigpu([two()], [t()]),
    "all_gather_object": lambda: legacy.all_gather_object([None] * 2, 1),
    "all_gather_single": lambda: legacy.all_gather_single(whole(), t()),
    "all_reduce": lambda: legacy.all_reduce(t()),
    "all_reduce_coalesced": lambda: legacy.all_reduce_coalesced([t()]),
    "all_reduce_multigpu": lambda: legacy.all_reduce_multigpu(two()),
    "all_to_all": lambda: legacy.all_to_all(two(), two()),
    "all_to_all_single": lambda: legacy.all_to_all_single(t(), t()),
    "barrier": lambda: legacy.barrier(),
    "batch_isend_irecv": lambda: legacy.batch_isend_irecv([legacy.P2POp(legacy.isend, t(), 1)]),
    "broadcast": lambda: legacy.broadcast(t(), 0),
    "broadcast_multigpu": lambda: legacy.broadcast_multigpu(two(), 0),
    "broadcast_object_list": lambda: legacy.broadcast_object_list([1], 0),
    "gather": lambda: legacy.gather(t(), two(), 0),
    "gather_object": lambda: legacy.gather_object(1, [None] * 2, 0),
    "gather_into_tensor": lambda: legacy.gather_into_tensor(t(), whole(), 0),
    "gather_single": lambda: legacy.gather_single(t(), whole(), 0),
    "irecv": lambda: legacy.irecv(t(), 1),
    "isend": lambda: legacy.isend(t(), 1),
    "recv": lambda: legacy.recv(t(), 1),
    "reduce": lambda: legacy.reduce(t(), 0),
    "reduce_multigpu": lambda: legacy.reduce_multigpu(two(), 0),
    "reduce_scatter": lambda: legacy.reduce_scatter(t(), two()),
    "reduce_scatter_multigpu": lambda: legacy.reduce_scatter_multigpu([t()], [two()]),
    "reduce_scatter_single": lambda: legacy.reduce_scatter_single(t(), whole()),
    "reduce_scatter_tensor": lambda: legacy.reduce_scatter_tensor(t(), whole()),
    "scatter": lambda: legacy.scatter(t(), two(), 0),
    "scatter_object_list": lambda: legacy.scatter_object_list([None], [1, 2], 0),
    "send": lambda: legacy.send(t(), 1),
    "send_object_list": lambda: legacy.send_object_list([1], 1),
}
LEGACY_WITH_A_PEER = {"recv_object_list"}
LEGACY_NO_OPERATIONS = {
    *("_get_default_store", "_get_default_timeout", "_get_global_rank", "_set_pg_timeout"),
    *("_new_window", "_supports_window", "_time_estimator", "new_window"),
    *("_get_default_group", "_get_process_group_name", "_make_nccl_premul_sum", "_rank_not_in_group"),
    *("destroy_process_group", "get_backend", "get_backend_config", "get_backend_impl", "set_timeout"),
    *("get_default_backend_for_device", "get_global_rank", "get_group_rank", "get_node_local_rank"),
    *("get_pg_count", "get_process_group_ranks", "get_rank", "get_world_size", "init_process_group"),
    *("is_available", "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available"),
    *("is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available"),
    *("monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration"),
    *("record_comm", "register_rendezvous_handler", "rendezvous"),
    *("shrink_group", "split_group", "supports_complex"),
}


def coalesced(pg: ProcessGroup) -> None:
    """Run an operation in a block."""
    with pg.coalescing() as batch:
        pg.all_reduce(t())
    batch.wait()


def legacy_coalesced() -> None:
    """Run an operation in a block of the global API."""
    with legacy._coalescing_manager():
        legacy.all_reduce(t())


class Looks:
    """The state that a signal handler would find during each operation."""

    def __init__(self, pg: ProcessGroup) -> None:
        self.found: list[tuple[bool, bool]] = []
        self._plan = pg.backend.plan
        pg.backend.plan = pg.backend.plan_plain = self._plan_look  # type: ignore[method-assign]  # in its place

    def _plan_look(self, signature: Signature) -> Any:
        execute = self._plan(signature)

        def look(*arguments: Any) -> Any:
            self.found.append((defers_ctrl_c(sys._getframe()), inside_library_call()))
            return execute(*arguments)

        return look

    def see_marks(self) -> bool:
        """Whether there were operations, and marks in all of them."""
        return bool(self.found) and set(self.found) == {(True, True)}


def public_names(of: type) -> set[str]:
    """Return the names of a class that are dist2's own."""
    ours = [base for base in of.__mro__ if base.__module__.partition(".")[0] == "dist2"]
    return {name for base in ours for name in vars(base) if not name.startswith("_")}


def test_every_public_method_is_known() -> None:
    """New methods must be entered in a table of this module."""
    assert public_names(ProcessGroup) - set(INSTEAD) == {*OPERATIONS, *WITH_A_PEER, *NO_OPERATIONS}
    functions = {name for name in legacy.__all__ if isinstance(getattr(legacy, name), FunctionType)}
    assert functions == {*LEGACY_OPERATIONS, *LEGACY_WITH_A_PEER, *LEGACY_NO_OPERATIONS}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_handler_in_the_midst_of_an_operation_sees_marks(pg: ProcessGroup, name: str) -> None:
    looks = Looks(pg)
    OPERATIONS[name](pg)
    assert looks.see_marks()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that torch deprecates
@pytest.mark.parametrize("name", LEGACY_OPERATIONS)
def test_a_handler_in_the_midst_of_a_legacy_call_sees_marks(pg: ProcessGroup, name: str) -> None:
    looks = Looks(pg)
    with dist2.process_group(pg):
        LEGACY_OPERATIONS[name]()
    assert looks.see_marks()


@pytest.mark.parametrize("store", [Store, HashStore, FileStore, PrefixStore, TCPStore])
def test_ctrl_c_is_raised_at_once_in_stores_and_closing_a_group_is_not_done_there(store: type) -> None:
    methods = [vars(base).get(name) for base in store.__mro__ for name in public_names(store)]
    codes = {code for method in methods for code in codes_of(method) if is_ours(code)}
    assert len(codes) > 10
    assert {ctrl_c_marks.of(code) for code in codes} == {OnCtrlC.RAISE}
    assert all(lock_marks.of(code) for code in codes)


@pytest.mark.parametrize(
    "part",
    [Batch, Completion, CppWork, CtrlC],  # compiled modules are not interrupted
    ids=lambda part: part.__name__,
)
def test_ctrl_c_waits_in_what_threads_and_groups_share(part: type) -> None:
    codes = [code for method in vars(part).values() for code in codes_of(method) if is_ours(code)]
    assert len(codes) > 3
    assert {ctrl_c_marks.of(code) for code in codes} == {OnCtrlC.DEFER}


def test_ctrl_c_waits_where_python_would_discard_it() -> None:
    """In callbacks of weak references and in destructors: here where methods of such modules call others."""
    found = []

    class Looks:
        def __hash__(self) -> int:
            found.append(defers_ctrl_c(sys._getframe()))
            return 1

        def __del__(self) -> None:
            found.append(defers_ctrl_c(sys._getframe()))

    assert not defers_ctrl_c(sys._getframe())
    looks = Looks()
    WeakSet[Looks]().add(looks)
    WeakKeyDictionary[Looks, int]()[looks] = 1
    looks.__del__()
    assert len(found) == 3
    assert all(found)


# Code that enters the data plane

ENTERS = frozenset(
    {"_run", "_run_p2p", "_execute", "_issue", "_start", "_start_p2p", "_settle", "_follow", "_in_flight"}
    | {"enter_queued", "enter_beside", "pass_on", "hand_on"}
)
"""Names that only code of the data plane uses."""
LOCK = re.compile(r"_\w*(lock|mutex)")
LEFT_OUT = {
    "dist2.cli",  # programs, with methods of these names of their own
    "dist2.backends.gloo",  # torch's C++ runs these: Ctrl-C cannot spoil its links
    "dist2.backends.plugin",  # an object of another package runs these
    "dist2.group.open_groups",  # the same thread may take its lock again; tables change in single steps
    "dist2.security",  # counts refusals, on the acceptor's thread
    # Ctrl-C interrupts a single change of a table here, and the table's lock is released.
    *(
        "dist2.operation.instruments",
        "dist2.backends.registry",
        "dist2.rendezvous",
        "dist2.backends.shared_tensors",
        "dist2.legacy.world",
        "dist2.runtime.usage",
    ),
}


def names_in(code: CodeType) -> set[str]:
    """Return the attributes and global names that a function uses."""
    return {*code.co_names}.union(*(names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def is_ours(code: CodeType) -> bool:
    """Whether code is of this library."""
    return lock_marks.of(code) is not None


def unmarked(module: str, thing: Any) -> list[str]:
    """Return the functions of a module, or of a class in one, that enter the data plane unmarked."""
    if isinstance(thing, type) and thing.__module__ == module:
        return [each for member in vars(thing).values() for each in unmarked(module, member)]
    if isinstance(thing, type) or getattr(thing, "__module__", module) != module:
        return []
    return [
        f"{module}.{code.co_qualname} uses {', '.join(sorted(used))}"
        for code in codes_of(thing)
        if is_ours(code) and ctrl_c_marks.of(code) is None
        for used in [{name for name in names_in(code) if name in ENTERS or LOCK.fullmatch(name)}]
        if used
    ]


def test_code_that_enters_the_data_plane_is_marked() -> None:
    assert {
        each.__name__ for each in (mpi, nccl, socket)
    } <= sys.modules.keys()  # loaded by entry points as a rule
    found = [
        breach
        for name in [name for name in sys.modules if name.startswith("dist2.")]
        if not any(f"{name}.".startswith(f"{each}.") for each in LEFT_OUT)
        for thing in vars(sys.modules[name]).values()
        for breach in unmarked(name, thing)
    ]
    assert not found, "\n".join(found)


def test_unmarked_code_that_enters_the_data_plane_is_seen() -> None:
    source = "class New:\n    def all_sum(self, tensor):\n        return self._run(tensor)\n"
    file = sys.modules["dist2"].__file__ or ""
    names = {"__name__": "dist2.new"}
    exec(compile(source, file, "exec"), names)
    assert unmarked("dist2.new", names["New"]) == ["dist2.new.New.all_sum uses _run"]


# Code that closes groups


class Closed(Told):
    """Records the thread that reports the end of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[threading.Thread] = []

    def group_closed(self, group: Any) -> None:
        self.by.append(threading.current_thread())


def _leave(pg: ProcessGroup) -> None:
    with pg:
        pass


def _raise_out(pg: ProcessGroup) -> None:
    with pytest.raises(ZeroDivisionError), pg:
        raise ZeroDivisionError


ENDS: dict[str, Call] = {
    "shutdown": lambda pg: pg.shutdown(),
    "abort": lambda pg: pg.abort(),
    "with": _leave,
    "with_an_error": _raise_out,
    "view_shutdown": lambda pg: BackendView(pg).shutdown(),
    "view_abort": lambda pg: BackendView(pg).abort(),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_group_that_is_closed_between_operations_is_closed_here(name: str) -> None:
    """An unmarked function would run on another thread, and `shutdown` would wait for nothing."""
    closed = Closed()
    remove = dist2.add_instrument(closed)
    try:
        ENDS[name](dist2.new_group("fake", store=HashStore(), rank=0, world_size=1))
    finally:
        remove()
    assert closed.by == [threading.current_thread()]


@pytest.mark.parametrize(
    "function",
    [GlooBackend.abort, open_groups._end_forgotten],
    ids=lambda each: each.__name__,
)
def test_other_ways_to_close_a_group_hold_no_lock(function: Callable[..., object]) -> None:
    assert {lock_marks.of(code) for code in codes_of(function)} == {False}


def test_the_global_api_closes_groups_here() -> None:
    closed = Closed()
    remove = dist2.add_instrument(closed)
    try:
        legacy.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
        legacy.new_group([0, 1])
        legacy.shrink_group([1])
        legacy.destroy_process_group()
    finally:
        remove()
    assert closed.by == [threading.current_thread()] * 3


@pytest.mark.parametrize("name", ENDS)
def test_a_group_that_is_closed_in_an_operation_is_closed_elsewhere(pg: ProcessGroup, name: str) -> None:
    closed = Closed()
    remove = dist2.add_instrument(closed)
    other = dist2.new_group("fake", store=HashStore(), rank=0, world_size=1, name="other")
    backend_does(pg, lambda operation: ENDS[name](other))
    try:
        pg.all_reduce(torch.ones(2))
        for thread in threading.enumerate():
            if thread.name.startswith("dist2-abort"):
                thread.join(10)
    finally:
        remove()
    assert [each.name for each in closed.by] == ["dist2-abort-other"]
