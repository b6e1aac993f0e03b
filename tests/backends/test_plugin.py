"""Groups on backends that are registered with torch: arguments of creators, and additions of dist2."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import ROOT, run
from support.ranks import Tenant, run_ranks
from support.torch_plugins import KINDS, Duck, taken_options
from torch.distributed import Backend as TorchBackend

import dist2
from dist2 import (
    BackendUnavailableError,
    GroupAbortedError,
    HashStore,
    InvalidUsageError,
    OperationTimeoutError,
    ProcessGroup,
    UnknownOptionError,
    add_instrument,
    legacy,
)
from dist2.backends.plugin.backend import Written

TENANTS = [Tenant(kind, kind, bitwise=False, complete=False) for kind in KINDS]
ON_ALL = pytest.mark.parametrize("tenant", TENANTS, ids=str)


def alone(backend: str, **options: Any) -> Any:
    return dist2.new_group(backend, 5, store=HashStore(), rank=0, world_size=1, **options)


class Finished:
    """An instrument that keeps the operations that have ended."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def group_opened(self, group: Any) -> None:
        pass

    group_closed = operation_started = group_opened

    def operation_finished(self, operation: Any) -> None:
        self.kinds.append(operation.signature.kind.value)


def test_a_package_offers_a_backend_by_the_entry_points_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that cannot be imported, and one that registers nothing."""
    lines = ["[torch.distributed.backends]", "Offered = offered:register", "absent = no_such_module:register"]
    (info := tmp_path / "offered-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([*lines, "silent = offered:name", ""]))
    (tmp_path / "offered.py").write_text(
        "import torch.distributed as dist\n"
        "from support.torch_plugins import Duck as create\n"
        "def register(): dist.Backend.register_backend('offered', create, devices=['cpu'])\n"
        "def name(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert {"offered", "absent", "silent"} <= {*dist2.backend_names()}
    with alone("offered") as pg:
        pg.barrier()
    with pytest.raises(BackendUnavailableError, match="'absent' cannot be used here: No module named"):
        alone("absent")
    with pytest.raises(BackendUnavailableError, match="'offered:name' registers no backend 'silent'"):
        alone("silent")


@ON_ALL
def test_a_group_has_all_of_dist2(tenant: Tenant) -> None:
    finished = Finished()
    remove = add_instrument(finished)

    def body(pg: ProcessGroup) -> list[str]:
        seen: list[str] = []
        pg.register_completion_hook(lambda operation: seen.append(operation.signature.kind.value))
        works = [pg.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        assert all(work.wait() for work in works)
        pg.reduce_scatter_single(torch.zeros(2), torch.ones(2 * pg.size()))
        with pytest.raises(InvalidUsageError, match="root"):
            pg.broadcast(torch.ones(1), 7)
        part = pg.split([1, 0])
        part.all_reduce(mine := torch.tensor([float(pg.rank() + 1)]))
        assert mine.item() == 3.0
        part.shutdown()
        assert pg.name() == tenant.backend
        return seen

    try:
        seen = run_ranks(2, body, tenant)
    finally:
        remove()
    assert seen == [["all_reduce"] * 3 + ["reduce_scatter_single"]] * 2
    assert finished.kinds.count("all_reduce") == 8


@pytest.mark.parametrize("kind", ["compiled", "duck"])
def test_late_and_aborted_operations_end(kind: str) -> None:
    """Also if the object is the first to notice the timeout: the one in Python waits at the store."""
    tenant = Tenant(kind, kind, bitwise=False)

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 1:
            pg.get_group_store().wait(["over"])
            return
        with pytest.raises(OperationTimeoutError):
            pg.all_reduce(torch.ones(1), timeout=0.3)
        pg.get_group_store().set("over", "")

    run_ranks(2, body, tenant)

    def aborting(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            threading.Timer(0.2, pg.abort).start()
            with pytest.raises(GroupAbortedError):
                pg.all_reduce(torch.ones(1))
            pg.get_group_store().set("over", "")
        else:
            pg.get_group_store().wait(["over"])

    run_ranks(2, aborting, tenant)


def test_the_object_is_shut_down_or_aborted() -> None:
    for how in ("shutdown", "abort"):
        pg = alone("duck")
        native: Duck = pg.backend.library.native
        getattr(pg, how)()
        for thread in threading.enumerate():
            if thread.name.startswith("dist2-abort"):
                thread.join(5)
        assert how in native.ended


@pytest.mark.parametrize("raised", [TimeoutError("late"), dist2.StoreTimeoutError("late")])
def test_a_timeout_of_the_object_is_one_of_the_operation(creator: list[Any], raised: Exception) -> None:
    class Late:
        def allreduce(self, *arguments: Any) -> None:
            raise raised

    creator[0] = Late()
    with alone("strange") as pg, pytest.raises(OperationTimeoutError, match="strange failed: late"):
        pg.all_reduce(torch.ones(2))


def test_outputs_that_are_not_contiguous_stay_as_they_are_where_the_object_fails() -> None:
    matrix = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="failed"), Written([matrix[:, 0]]) as (target,):
        target.zero_()
        raise RuntimeError("failed")
    assert bool((matrix == 1).all())


@pytest.fixture
def creator() -> Iterator[list[Any]]:
    """Yield the list that holds the result of a backend "strange", which is registered for the time of the
    test."""
    made: list[Any] = [None]
    TorchBackend.register_backend("strange", lambda *arguments: made[0], devices=["cpu"])
    yield made
    TorchBackend._plugins.pop("STRANGE")
    TorchBackend.backend_list.remove("strange")


def test_creators_that_return_something_else(creator: list[Any]) -> None:
    with pytest.raises(InvalidUsageError, match="creator of backend 'strange' returned None"):
        alone("strange")
    creator[0] = inner = alone("gloo")
    assert alone("strange") is inner
    inner.shutdown()
    creator[0] = object()
    with (
        alone("strange") as pg,
        pytest.raises(InvalidUsageError, match="its object does not support allreduce"),
    ):
        pg.all_reduce(torch.ones(2))


def test_options_go_to_creators_that_take_them() -> None:
    taken_options.clear()
    alone("extended", pg_options="mine").shutdown()
    assert taken_options == ["mine"]
    with pytest.raises(UnknownOptionError, match="registered with torch and has no option 'colour'"):
        alone("compiled", colour="red")
    with pytest.raises(InvalidUsageError, match="'compiled' takes no pg_options"):
        alone("compiled", pg_options=1)


def test_the_global_api_takes_them() -> None:
    taken_options.clear()
    legacy.init_process_group(
        "extended", store=HashStore(), rank=0, world_size=1, pg_options={"pg_options": "mine"}
    )
    legacy.all_reduce(tensor := torch.ones(2))
    part = legacy.new_group([0], backend="duck")
    legacy.all_reduce(tensor, group=part)
    assert taken_options == ["mine"]
    assert legacy.get_backend() == legacy.Backend.EXTENDED
    legacy.destroy_process_group()


def test_names_are_listed_and_taken() -> None:
    assert set(KINDS) <= set(dist2.backend_names())
    with pytest.raises(ValueError, match="Backend duck already registered"):
        legacy.Backend.register_backend("Duck", Duck)


@pytest.mark.timeout(120)
def test_the_template_installs_by_itself_and_passes(tmp_path: Any) -> None:
    package = ROOT / "examples" / "custom_backend"
    source = tmp_path / "source"
    run(["cp", "-r", package, source])
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    ended = run([*install, "--no-index", "--target", tmp_path / "installed", source], timeout_s=60)
    assert ended.code == 0, ended
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    tests += ["--rootdir", str(source), "-k", "broadcast or tags or reduce_scatter", str(source / "tests")]
    ended = run(tests, timeout_s=60, variables={"PYTHONPATH": str(tmp_path / "installed")})
    assert ended.code == 0, ended
    assert " passed" in ended.output
