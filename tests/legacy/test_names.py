"""Names, signatures and checks of the global API that need no other ranks."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from torch.distributed import HashStore, ReduceOp, distributed_c10d

import dist2
import dist2.legacy as ours
from dist2.legacy import names

ADDED = {"init_process_group": ("register_with_torch",)}
"""Keywords that only dist2 has."""

NEWER = {
    "all_gather_object": ("weights_only",),
    "barrier": ("timeout",),
    "broadcast_object_list": ("weights_only",),
    "gather_object": ("weights_only",),
    "init_process_group": ("_ranks", "enable_reconfigure"),
    "new_group": ("sort_ranks",),
    "recv_object_list": ("use_batch", "weights_only"),
    "scatter_object_list": ("weights_only",),
    "send_object_list": ("use_batch", "weights_only"),
    "split_group": ("backend",),
}
"""Parameters that older versions of torch lack."""

THEIRS: dict[str, Any] = {**vars(distributed_c10d), **vars(theirs)}
REPLACED = sorted(
    name
    for name, function in THEIRS.items()
    if type(function) is FunctionType and getattr(ours, name) is not function
)
"""torch's functions, private ones included, that dist2 has another one for."""


def test_every_public_name_is_there() -> None:
    assert [name for name in ours.__all__ if not hasattr(ours, name)] == []
    with pytest.raises(AttributeError, match=r"has no attribute 'all_reduced'$"):
        _ = ours.all_reduced


@pytest.mark.parametrize("name", REPLACED)
def test_signatures_are_those_of_torch(name: str) -> None:
    def shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    added = [(word, inspect.Parameter.KEYWORD_ONLY, True) for word in ADDED.get(name, ())]
    ours_has, theirs_has = shape(getattr(ours, name)), shape(THEIRS[name])
    newer = set(NEWER.get(name, ())) - {named for named, *_ in theirs_has}
    assert [each for each in ours_has if each[0] not in newer] == theirs_has + added


def test_types_are_torchs_or_subclasses() -> None:
    for name in ("Store", "ProcessGroup", "Work", "PrefixStore"):
        assert issubclass(getattr(ours, name), theirs.Store if "Store" in name else getattr(theirs, name))
    assert ours.ReduceOp is ReduceOp
    assert ours.default_pg_timeout == distributed_c10d.default_pg_timeout
    assert ours.GroupMember.NON_GROUP_MEMBER == theirs.GroupMember.NON_GROUP_MEMBER


TENSOR = torch.ones(2)
CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: ours.all_reduce(TENSOR),
    "broadcast": lambda: ours.broadcast(TENSOR, 0),
    "barrier": ours.barrier,
    "send": lambda: ours.send(TENSOR, 0),
    "recv": lambda: ours.recv(TENSOR),
    "P2POp": lambda: ours.P2POp(ours.isend, TENSOR, 0),
    "all_gather_object": lambda: ours.all_gather_object([None], 1),
    "get_rank": ours.get_rank,
    "get_world_size": ours.get_world_size,
    "get_backend": ours.get_backend,
    "new_group": ours.new_group,
    "new_subgroups": lambda: ours.new_subgroups(1),
    "split_group": lambda: ours.split_group(split_ranks=[[0]]),
    "shrink_group": lambda: ours.shrink_group([0]),
    "destroy_process_group": ours.destroy_process_group,
    "get_process_group_ranks": lambda: ours.get_process_group_ranks(None),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_works_before_init(name: str) -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        CALLS[name]()
    assert not ours.is_initialized()
    assert ours.group.WORLD is None
    assert ours.get_pg_count() == 0


def test_objects_work_without_init() -> None:
    """Groups of the object API are taken by the global one, before and without `init_process_group`."""
    with dist2.new_group("gloo", store=HashStore(), rank=0, world_size=1, hostname="127.0.0.1") as pg:
        assert ours.get_rank(pg) == 0
        ours.all_reduce(tensor := torch.ones(2), group=pg)
        with dist2.process_group(pg):
            assert ours.get_world_size() == 1
            ours.barrier()
        assert tensor.tolist() == [1, 1]
        with pytest.raises(ValueError, match="Invalid process group specified"):
            ours.destroy_process_group(pg)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("GLOO", {"cpu": "gloo", "cuda": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("undefined", {"cpu": "socket"}),
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("cpu:socket", {"cpu": "socket"}),
    ],
)
def test_backend_strings(text: str, expected: dict[str, str]) -> None:
    config = ours.BackendConfig(ours.Backend(text))
    assert config.get_device_backend_map() == expected
    assert repr(config) == ",".join(f"{device}:{name}" for device, name in expected.items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu:gloo,cuda", "Invalid device:backend pairing"),
        ("cpu:gloo:x", "Invalid device:backend pairing"),
        (":gloo", "Invalid device:backend pairing"),
        ("cpu:gloo,cpu:socket", "Duplicate device type cpu"),
    ],
)
def test_bad_backend_strings(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ours.BackendConfig(ours.Backend(text))


def test_backend_names() -> None:
    assert ours.Backend("GLOO") == ours.Backend.GLOO == "gloo"
    assert ours.Backend.SOCKET == "socket"
    assert {"gloo", "fake", "socket"} <= set(ours.Backend.backend_list)
    with pytest.raises(AttributeError, match="NOBODY"):
        _ = ours.Backend.NOBODY
    with pytest.raises(TypeError, match="string-ish"):
        ours.Backend(3)
    assert ours.get_default_backend_for_device("cpu") == "socket"
    with pytest.raises(ValueError, match="not registered for device"):
        ours.get_default_backend_for_device("meta")
    assert ours.is_backend_available("cpu:gloo")
    assert not ours.is_backend_available("cpu:gloo,cuda:nobody")
    assert ours.is_gloo_available()
    assert ours.is_backend_available("fake")


@pytest.mark.parametrize(("name", "package"), [("nccl", "cupy"), ("mpi", "mpi4py")])
def test_a_backend_is_available_with_its_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs choose the backend by this: "nccl" would fail where it cannot be used."""
    installed = {package}
    monkeypatch.setattr(names, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    ask = getattr(ours, f"is_{name}_available")
    assert ask()
    assert ours.is_backend_available(name)
    installed.clear()
    assert not ask()
    assert not ours.is_backend_available(f"cpu:{name}")


def test_nccl_is_not_available_with_a_torch_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert not ours.is_nccl_available()


def test_unknown_backends_are_told() -> None:
    with pytest.raises(dist2.UnknownBackendError, match="'nobody'"):
        ours.init_process_group("nobody", store=HashStore(), rank=0, world_size=1)
    assert not ours.is_initialized()


def test_backends_left_out_are_told() -> None:
    with pytest.warns(UserWarning, match="using cpu:gloo, not cuda:nccl") as said:
        ours.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    assert said[0].filename == __file__
    assert ours.get_backend() == "gloo"
    assert ours.get_backend_config() == "cpu:gloo"
    ours.destroy_process_group()


def test_any_rank_of_a_fake_world() -> None:
    ours.init_process_group("fake", rank=5, world_size=8)
    ours.all_reduce(tensor := torch.ones(2))
    assert (ours.get_rank(), ours.get_world_size(), tensor.tolist()) == (5, 8, [1, 1])
    group = ours.new_group([5, 7])
    assert ours.get_process_group_ranks(group) == [5, 7]
    assert ours.new_group([1, 2]) == ours.GroupMember.NON_GROUP_MEMBER
    ours.destroy_process_group()


def test_a_backend_of_ones_own() -> None:
    def create(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
        assert timeout.total_seconds() == 1800
        return dist2.new_group("gloo", store=store, rank=rank, world_size=world_size)

    ours.Backend.register_backend("OwnBackend", create, devices="cpu")
    assert ours.Backend.OWNBACKEND == "ownbackend"
    ours.init_process_group("ownbackend", store=HashStore(), rank=0, world_size=1)
    ours.barrier()
    ours.destroy_process_group()
    with pytest.raises(ValueError, match="already registered"):
        ours.Backend.register_backend("ownbackend", create)
    torch.distributed.Backend._plugins.pop("OWNBACKEND")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_method": "env://", "store": HashStore()}, "Cannot specify both init_method and store"),
        ({"store": HashStore(), "rank": 0}, "world_size must be positive"),
        ({"store": HashStore(), "world_size": 1}, "rank must be non-negative"),
    ],
)
def test_ways_to_meet_exclude_each_other(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ours.init_process_group("gloo", **arguments)


@pytest.mark.parametrize("seconds", [0, -1])
def test_timeouts_are_positive(seconds: int) -> None:
    """torch's default is for None only; a wrong timeout is refused before ranks wait for each other."""
    with pytest.raises(ValueError, match="timeout must be positive"):
        ours.init_process_group("socket", "tcp://127.0.0.1:1", timedelta(seconds=seconds), 2, 1)
    assert not ours.is_initialized()


def test_option_and_timeout_types() -> None:
    meeting: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
    with pytest.raises(TypeError, match=r"datetime\.timedelta"):
        ours.init_process_group("gloo", timeout=30, **meeting)
    with pytest.raises(TypeError, match="pg_options must be a mapping"):
        ours.init_process_group("gloo", pg_options=object(), **meeting)
    with pytest.raises(dist2.UnknownOptionError, match="'colour'"):
        ours.init_process_group("gloo", pg_options={"colour": 1}, **meeting)


def test_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert ours.get_node_local_rank(3) == 3
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not in the environment"):
        ours.get_node_local_rank()
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert ours.get_node_local_rank(3) == 2


def test_debug_levels_are_torchs() -> None:
    assert ours.get_debug_level() == theirs.get_debug_level()


@pytest.mark.parametrize("op", sorted(ReduceOp.RedOpType.__members__.keys() - {"UNUSED"}))
def test_complex_support_is_torchs(op: str) -> None:
    assert ours.supports_complex(getattr(ReduceOp, op)) == theirs.supports_complex(getattr(ReduceOp, op))


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_the_default_backends_of_other_devices_are_torchs(device: str) -> None:
    assert ours.get_default_backend_for_device(device) == theirs.get_default_backend_for_device(device)
    assert ours.get_default_backend_for_device(torch.device(device, 0)) == names.OF_TORCH.get(
        theirs.get_default_backend_for_device(device), theirs.get_default_backend_for_device(device)
    )


def test_the_default_backends_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = ours.Backend.default_device_backend_map
    # Another test may have registered it.
    monkeypatch.delitem(theirs.Backend.default_device_backend_map, "hpu", raising=False)
    with pytest.raises(ValueError, match="Default backend not registered for device : hpu"):
        ours.get_default_backend_for_device("hpu")
    monkeypatch.setitem(defaults, "hpu", "hccl")
    assert ours.get_default_backend_for_device("hpu") == "hccl"
    assert "hpu" not in theirs.Backend.default_device_backend_map
    monkeypatch.setitem(
        theirs.Backend.default_device_backend_map, "mtia", "ours"
    )  # as a package registers it
    assert ours.get_default_backend_for_device("mtia") == "ours"
    monkeypatch.setattr(ours.Backend, "default_device_backend_map", {"cpu": "fake"})
    assert ours.get_default_backend_for_device("cpu") == "fake"
    ours.init_process_group(rank=0, world_size=1)
    assert ours.get_backend() == "fake"
    ours.destroy_process_group()


@pytest.mark.parametrize("name", ["nccl2", "nccl-legacy", "NCCL-lazy", "cuda:nccl2"])
def test_torchs_other_names_of_nccl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ours.BackendConfig(name).get_device_backend_map() == {"cuda": "nccl"}
    assert ours.is_backend_available(name) == ours.is_nccl_available()
    monkeypatch.setitem(theirs.Backend.default_device_backend_map, "cuda", name.lower().removeprefix("cuda:"))
    assert ours.get_default_backend_for_device("cuda") == "nccl"


def test_the_members_of_the_deprecated_reductions() -> None:
    with pytest.warns(FutureWarning, match="use `ReduceOp` instead"):
        assert ours.reduce_op.__members__ == ReduceOp.RedOpType.__members__


def test_world_is_the_only_state() -> None:
    """No module of the package but ``world`` rebinds or fills anything at module level."""
    folder = Path(ours.__file__).parent
    mutable = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], path
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, mutable):
                names = [ast.unparse(target) for target in getattr(node, "targets", [node])]
                assert path.name == "world.py" or all(name.isupper() or name == "__all__" for name in names)
