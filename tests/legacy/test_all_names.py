"""Every name of torch.distributed, those that libraries use besides, and the words of its errors."""

from __future__ import annotations

import pkgutil
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date, timedelta
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from legacy.used_names import USED
from support.threads import together
from torch.distributed import ReduceOp, distributed_c10d

import dist2
import dist2.legacy as ours
from dist2 import HashStore

LISTED = [
    *("GroupName", "record_comm", "ProcessGroupGloo", "breakpoint", "DeviceMesh", "init_device_mesh"),
    *("_remote_device", "Reducer", "GradBucket", "Logger", "BuiltinCommHookType", "_register_comm_hook"),
    *("_broadcast_coalesced", "_verify_params_across_processes", "_compute_bucket_assignment_by_size"),
    *("_ControlCollectives", "_StoreCollectives", "_Backend", "_Work", "_create_process_group_wrapper"),
    *("_time_estimator", "_get_default_store", "distributed_c10d", "device_mesh", "rpc", "algorithms"),
]
OURS_ALONE = [
    *("_DistributedPdb", "gather_single", "all_reduce_multigpu", "all_gather_multigpu", "broadcast_multigpu"),
    *("reduce_multigpu", "reduce_scatter_multigpu", "_make_nccl_premul_sum", "_get_global_rank"),
    *(
        "new_window",
        "_new_window",
        "_supports_window",
        "gather_into_tensor",
        "set_timeout",
        "get_backend_impl",
    ),
]


@pytest.fixture
def alone() -> Iterator[None]:
    ours.init_process_group(store=HashStore(), rank=0, world_size=1)
    yield
    ours.destroy_process_group()


def test_nothing_of_torchs_is_missing() -> None:
    with_public = {name for module in (theirs, distributed_c10d) for name in vars(module) if name[0] != "_"}
    present = {name for name in LISTED if hasattr(theirs, name) or hasattr(distributed_c10d, name)}
    wanted = (
        with_public | present | set(OURS_ALONE) | {name for names in USED.values() for name in names.split()}
    )
    assert [name for name in sorted(wanted) if not hasattr(ours, name)] == []
    assert present >= {"Reducer", "_Backend", "DeviceMesh"}
    assert set(LISTED) - {"GroupName", "record_comm", "_time_estimator"} <= set(dir(ours)) | set(
        dir(distributed_c10d)
    )


def test_names_of_torchs_binding_alone() -> None:
    binding: Any = torch._C._distributed_c10d
    missing = [name for name in dir(binding) if not hasattr(ours, name)]
    assert missing == []
    for name in ("OpType", "WorkInfo", "_WorkerServer", "_register_work", "_SymmetricMemory"):
        assert getattr(ours, name) is getattr(binding, name)


@pytest.mark.parametrize("name", ["_StoreCollectives", "_ControlCollectives"])
def test_names_that_torch_2_14_has_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (theirs, distributed_c10d, torch._C._distributed_c10d):
        monkeypatch.delattr(module, name, raising=False)
    assert getattr(ours, name) is dist2.StoreCollectives
    assert name in dir(ours)


def test_no_module_of_ours_hides_a_name_of_torchs() -> None:
    """A submodule is an attribute of its package, where torch may have an object or a submodule."""
    modules = {each.name for each in pkgutil.iter_modules(ours.__path__)}
    submodules = {each.name for each in pkgutil.iter_modules(theirs.__path__)}
    assert modules & {*submodules, *vars(theirs), *vars(distributed_c10d)} == set()
    assert ours._world is distributed_c10d._world


def test_functions_of_torchs_are_dist2s_where_they_act_on_groups() -> None:
    """Functions that fall through to torch act on no group, or get it from torch's tables."""
    passed_on = {
        name
        for name in distributed_c10d.__all__
        if isinstance(getattr(ours, name), types.FunctionType) and name not in vars(ours)
    }
    assert passed_on == set()


def test_torchs_functions_find_the_group(alone: None) -> None:
    ours: Any = dist2.legacy
    pg = ours.group.WORLD
    assert ours.init_device_mesh("cpu", (1,)).get_group() is pg
    assert ours._get_default_store().list_keys() == []
    assert ours.distributed_c10d._get_default_group() is pg
    assert ours._get_pg_default_device is distributed_c10d._get_pg_default_device
    assert list(ours._pg_map) == [pg]
    ours._set_pg_timeout(timedelta(seconds=7))
    assert pg is not None
    assert pg.timeout_s == 7


def test_the_default_group_may_be_set(alone: None) -> None:
    first = ours.group.WORLD
    ours.group.WORLD = None
    assert not ours.is_initialized()
    assert not theirs.is_initialized()
    ours.group.WORLD = first
    assert theirs.group.WORLD is ours.GroupMember.WORLD is first
    with pytest.raises(ValueError, match=r"group\.WORLD must be a dist2 process group or None, got 3"):
        ours.group.WORLD = 3  # type: ignore[assignment]  # which is refused


def test_backends_have_torchs_tables() -> None:
    assert type(ours.Backend("GLOO")) is str
    assert ours.BackendConfig("gloo").get_device_backend_map() == {"cpu": "gloo", "cuda": "gloo"}
    assert ours.Backend.backend_capability["nccl"] == ["cuda"]
    assert ours.Backend.backend_capability["socket"] == ["cpu", "cuda"]
    assert ours.Backend.backend_type_map["socket"] == theirs.ProcessGroup.BackendType.CUSTOM
    assert ours.Backend.backend_type_map["gloo"] == theirs.ProcessGroup.BackendType.GLOO
    assert ours.Backend._plugins is theirs.Backend._plugins


def test_a_factor_makes_a_reduce_op() -> None:
    op = ours._make_nccl_premul_sum(2.0)
    assert isinstance(op, ReduceOp)
    assert op == ReduceOp.PREMUL_SUM
    options = theirs.AllreduceOptions()
    options.reduceOp = op
    with dist2.new_group("socket", store=HashStore(), rank=0, world_size=1) as pg:
        pg.allreduce([first := torch.ones(2)], options).wait()
        ours.all_reduce(second := torch.ones(2), ours._make_nccl_premul_sum(torch.tensor([3.0])), pg)
        assert pg.getBackendName() == "socket"
    assert (first.tolist(), second.tolist()) == ([2, 2], [3, 3])


def test_torchs_option_objects_are_taken() -> None:
    gloo: Any = theirs.ProcessGroupGloo
    options = gloo._Options()
    ours.init_process_group(store=HashStore(), rank=0, world_size=1, pg_options=options)
    ours.new_group([0], pg_options=options)
    ours.destroy_process_group()


def test_a_bare_store_has_no_extended_api() -> None:
    class Bare(dist2.Store):
        pass

    assert not Bare().has_extended_api()
    assert HashStore().has_extended_api()


def test_a_tensor_for_all(alone: None) -> None:
    ours.gather_single(torch.ones(2), whole := torch.zeros(2))
    assert whole.tolist() == [1, 1]
    with pytest.raises(ValueError, match="output must be contiguous at the root and have 2 elements, got 3"):
        ours.gather_single(torch.ones(2), torch.zeros(3))
    with pytest.raises(ValueError, match="gather_tensor must be specified on the destination rank"):
        ours.gather_single(torch.ones(2))
    ours.gather_into_tensor(torch.ones(2), whole.zero_())  # an alias without a warning, as in torch 2.15
    assert whole.tolist() == [1, 1]


@pytest.mark.parametrize("async_op", [False, True])
def test_ranks_with_several_tensors(async_op: bool) -> None:
    store, issued = HashStore(), threading.Event()

    def rank_main(rank: int) -> list[list[float]]:
        ours.init_process_group("socket", rank=rank, world_size=2, store=store)
        if async_op and rank == 1:
            assert issued.wait(10)  # rank 0 calls all of them and waits for none

        def own() -> list[torch.Tensor]:
            return [torch.tensor([2.0 * rank + place]) for place in range(2)]

        total, highest, told, at_root, parts = own(), own(), own(), own(), own()
        gathered = [[torch.zeros(1) for _ in range(4)] for _ in range(2)]
        lists = [[torch.tensor([float(each)]) for each in range(4)]] * 2
        works = [
            ours.all_reduce_multigpu(total, async_op=async_op),
            ours.all_reduce_multigpu(highest, ReduceOp.MAX, async_op=async_op),
            ours.broadcast_multigpu(told, 1, async_op=async_op, src_tensor=1),
            ours.reduce_multigpu(at_root, 1, async_op=async_op, dst_tensor=1),
            ours.all_gather_multigpu(gathered, own(), async_op=async_op),
            ours.reduce_scatter_multigpu(parts, lists, async_op=async_op),
        ]
        issued.set()
        assert [work is not None and work.wait(10) for work in works] == [async_op] * 6
        ours.destroy_process_group()
        return [[t.item() for t in each] for each in (total, highest, told, at_root, *gathered, parts)]

    both = [[6.0, 6.0], [3.0, 3.0], [3.0, 3.0]]
    everything = [[0.0, 1.0, 2.0, 3.0]] * 2
    assert together(lambda: rank_main(0), lambda: rank_main(1)) == [
        [*both, [0.0, 1.0], *everything, [0.0, 4.0]],
        [*both, [2.0, 6.0], *everything, [8.0, 12.0]],
    ]


@pytest.mark.parametrize("async_op", [False, True])
def test_several_parameters(async_op: bool, alone: None) -> None:
    """They are written like any tensor, as by all other operations."""

    def pair(first: float, second: float) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.full((2,), value)) for value in (first, second)]

    total, told, at_root, parts, whole, lists = (pair(1.0, 2.0) for _ in range(6))
    works = [
        ours.all_reduce_multigpu(total, async_op=async_op),
        ours.broadcast_multigpu(told, 0, async_op=async_op, src_tensor=1),
        ours.reduce_multigpu(at_root, 0, async_op=async_op, dst_tensor=1),
        ours.all_gather_multigpu([whole, pair(0.0, 0.0)], pair(3.0, 4.0), async_op=async_op),
        ours.reduce_scatter_multigpu(parts, [lists, lists], async_op=async_op),
    ]
    assert [work is not None and work.wait(10) for work in works] == [async_op] * 5
    found = [[each[0].item() for each in params] for params in (total, told, at_root, whole, parts)]
    assert found == [[3.0, 3.0], [2.0, 2.0], [1.0, 3.0], [3.0, 4.0], [2.0, 4.0]]
    assert all(each.is_leaf and each.requires_grad for each in (*total, *parts))


def test_a_failure_reaches_those_that_wait_for_several_tensors() -> None:
    with dist2.new_group("socket", 20, store=HashStore(), rank=0, world_size=1) as pg:
        whole = ours.all_gather_multigpu([[torch.zeros(3)]], [torch.zeros(2)], pg, async_op=True)
        assert whole is not None
        with pytest.raises(RuntimeError, match="size of tensor"):
            whole.wait(10)
        assert isinstance(whole.exception(), RuntimeError)


def test_operations_have_a_name_in_torchs_profiler(alone: None) -> None:
    with torch.profiler.profile() as profile, ours.record_comm("the sum"):
        ours.all_reduce(torch.ones(2))
    assert "the sum" in {event.key for event in profile.key_averages()}


def test_windows_and_estimates_are_refused() -> None:
    """As torch does for backends without them; also where the group is not in torch's tables."""
    ours.init_process_group(store=HashStore(), rank=0, world_size=1, register_with_torch=False)
    try:
        assert not ours._supports_window()
        assert not ours.group.WORLD._get_backend("cpu").supports_window
        for call in (ours.new_window, ours._new_window):
            with pytest.raises(
                RuntimeError, match=r"^Backend socket does not support new_window: no backend"
            ):
                call(torch.ones(1))
        with (
            pytest.raises(NotImplementedError, match=r"not supported .* socket rank 0"),
            ours._time_estimator(),
        ):
            pass
    finally:
        ours.destroy_process_group()


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_only_objects_are_never_pickled(
    weights_only: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST2_ALLOW_PICKLE", "1")
    calls: list[Callable[[object], object]] = [
        lambda obj: ours.all_gather_object([None], obj, weights_only=weights_only),
        lambda obj: ours.gather_object(obj, [None], weights_only=weights_only),
        lambda obj: ours.broadcast_object_list([obj], weights_only=weights_only),
        lambda obj: ours.scatter_object_list([None], [obj], weights_only=weights_only),
    ]
    for call in calls:
        call({"plain": [1, torch.ones(2)]})
        with pytest.raises(ValueError, match="type date") if weights_only else nullcontext():
            call(date.min)


def test_messages_that_are_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setenv("DIST2_ALLOW_PICKLE", "1")

    def rank_main(rank: int) -> object:
        ours.init_process_group("socket", rank=rank, world_size=2, store=store)
        if rank == 0:
            with pytest.raises(ValueError, match="type date"):
                ours.send_object_list([date.min], 1, weights_only=True)
            ours.send_object_list([date.min], 1)
            ours.send_object_list([[3]], 1, weights_only=True)
            ours.barrier()
            return ours.destroy_process_group()
        with pytest.raises(ValueError, match="pickle"):
            ours.recv_object_list([None], 0, weights_only=True)
        ours.recv_object_list(got := [None], 0, weights_only=True)
        ours.barrier()
        ours.destroy_process_group()
        return got

    assert together(lambda: rank_main(0), lambda: rank_main(1))[1] == [[3]]


def test_groups_are_not_made_to_change_in_place() -> None:
    with pytest.raises(ValueError, match=r"enable_reconfigure must be False.*reconfigure\(uuid, handles\)"):
        ours.init_process_group(store=HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    assert not ours.is_initialized()


def test_limits_and_backends_by_the_names_of_torch_2_14(alone: None) -> None:
    pg = ours.group.WORLD
    ours.set_timeout(timedelta(seconds=8))
    assert pg is not None
    assert pg.timeout_s == 8
    assert ours.get_backend_impl().size() == ours.get_backend_impl(pg, torch.device("cpu")).size() == 1
    assert ours.get_backend_impl(theirs.group.WORLD.group_name).name() == "socket"
    with pytest.raises(ValueError, match="device is 'meta'"):
        ours.get_backend_impl(device=torch.device("meta"))


def test_words_that_programs_match_on(alone: None) -> None:
    with pytest.raises(ValueError, match="Rank -2 is out of range"):
        ours.new_group([-2])
    with pytest.raises(ValueError, match="does not support"):
        ours.all_reduce(torch.eye(2).to_sparse(), ours.ReduceOp.MAX)
    store = HashStore()

    def waits(rank: int) -> str:
        with dist2.new_group("socket", 20, store=store, rank=rank, world_size=2) as pg:
            if rank == 0:
                with pytest.raises(RuntimeError) as caught:
                    pg.monitored_barrier(timedelta(milliseconds=100))
                with pytest.raises(RuntimeError, match="Timed out"):
                    pg.barrier(timeout=0.1)
                pg.get_group_store().set("done", "1")
                return str(caught.value)
            pg.get_group_store().get("done")
            return ""

    assert (
        "Rank 1 failed to pass monitoredBarrier in 100 ms" in together(lambda: waits(0), lambda: waits(1))[0]
    )


def test_keys_are_named_as_the_user_named_them(alone: None) -> None:
    store = ours._get_default_store()
    with pytest.raises(RuntimeError, match=r"keys: mine$"):
        store.wait(["mine"], timedelta(milliseconds=10))
    store.set("mine", "1")
    assert store.list_keys() == ["mine"]
