"""Hooks before operations, and ``check_nan``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import TENANTS, Tenant, run_ranks

import dist2
from dist2 import GroupRevokedError, InvalidUsageError, NanError, ProcessGroup

INPROC = TENANTS[0]
NAN = torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])


def test_hooks_see_each_operation_and_its_tensors() -> None:
    def body(pg: ProcessGroup) -> None:
        seen: list[Any] = []

        def hook(operation: Any, inputs: Any, outputs: Any) -> None:
            seen.append((operation.signature.kind.value, list(inputs), list(outputs)))
            assert Path(operation.code.co_filename).name == Path(__file__).name

        x, parts = torch.ones(2), [torch.empty(2), torch.empty(2)]
        pg.all_reduce(x)  # its plan is known, and the usual call is in C
        remove = pg.register_pre_hook(hook)
        pg.register_pre_hook(lambda *_: None)
        calls: list[Callable[[], object]] = [
            lambda: pg.all_reduce(x),
            lambda: pg.allreduce([x]).wait(),
            lambda: pg.all_reduce(x, async_op=True).wait(),
            lambda: pg.all_gather(parts, x),
            lambda: pg.barrier(),
            lambda: pg.isend(x, 1) if pg.rank() == 0 else pg.recv(x, 0),
        ]
        for call in calls:
            call()
        with pg.coalescing() as batch:
            pg.all_reduce(x)
        batch.wait()
        kinds = [kind for kind, _, _ in seen]
        last = "send" if pg.rank() == 0 else "recv"
        assert kinds == ["all_reduce"] * 3 + ["all_gather", "barrier", last, "all_reduce"]
        assert seen[0][1][0] is x
        assert seen[0][2][0] is x
        assert [each is part for each, part in zip(seen[3][2], parts, strict=True)] == [True, True]
        remove()
        pg.all_reduce(x)
        assert len(seen) == len(kinds)

    run_ranks(2, body, INPROC)


@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_a_hook_refuses_an_operation_on_one_rank(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        def refuse(operation: Any, inputs: Any, outputs: Any) -> None:
            raise ValueError("not on a Friday")

        x = torch.ones(2)
        if pg.rank() == 1:
            pg.register_pre_hook(refuse)
            with pytest.raises(ValueError, match="Friday"):
                pg.all_reduce(x)
            assert x.tolist() == [1, 1]
        else:
            with pytest.raises(GroupRevokedError, match="not on a Friday") as caught:
                pg.all_reduce(x)
            assert caught.value.by == 1
            assert "rank 1" in str(caught.value)
        with pytest.raises(GroupRevokedError):
            pg.barrier()
        with pg.shrink() as again:
            assert again.size() == 2
            again.barrier()

    run_ranks(2, body, tenant)


def test_a_hook_whose_error_has_no_text_frees_the_others() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    def body(pg: ProcessGroup) -> None:
        def hook(*_: Any) -> None:
            raise SilentError

        if pg.rank() == 1:
            pg.register_pre_hook(hook)
        with pytest.raises(KeyError if pg.rank() == 1 else GroupRevokedError):
            pg.all_reduce(torch.ones(2))

    run_ranks(2, body, INPROC, timeout=5)


def test_a_nan_is_named_before_it_is_sent() -> None:
    def body(pg: ProcessGroup) -> None:
        with pg.split([0, 1]) as checked:  # derived groups check as well
            checked.all_reduce(torch.ones(2))
            checked.all_gather_single(torch.full((2,), float("nan")), torch.ones(1))  # outputs may have NaN
            if pg.rank() == 1:
                with pytest.raises(NanError) as caught:
                    checked.reduce_scatter(torch.empty(2, 2), [torch.ones(2, 2), NAN])
                assert caught.value.tensor == "inputs[1]"
                assert caught.value.index == (1, 0)
                assert caught.value.rank == 1
                text = str(caught.value)
                assert text.startswith("rank 1 passes NaN to reduce_scatter(")
                assert f"{Path(__file__).name}:" in text
                with pytest.raises(GroupRevokedError, match=r"revoked by rank 1 \(NanError: rank 1 passes"):
                    checked.barrier()
            else:
                with pytest.raises(GroupRevokedError, match="rank 1 passes NaN to reduce_scatter"):
                    checked.reduce_scatter(torch.empty(2, 2), [torch.ones(2, 2)] * 2)

    run_ranks(2, body, Tenant("inproc", "socket", {"transport": "inproc", "check_nan": True}))


def test_a_nan_in_what_a_broadcast_overwrites_is_none() -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch.ones(2) if pg.rank() == 0 else torch.full((2,), float("nan"))
        pg.broadcast(tensor, root=0)
        assert tensor.tolist() == [1.0, 1.0]
        with pytest.raises(NanError if pg.rank() == 1 else GroupRevokedError):
            pg.broadcast(torch.full((2,), float("nan")), root=1)

    run_ranks(2, body, Tenant("inproc", "socket", {"transport": "inproc", "check_nan": True}))


def test_tensors_without_values_have_no_nan() -> None:
    with dist2.new_group("fake", rank=0, world_size=2, check_nan=True) as pg:
        pg.all_reduce(torch.ones(2, device="meta"))


def test_the_variable_of_torch_switches_the_check_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    with dist2.new_group("fake", rank=0, world_size=2) as pg:
        pg.all_reduce(torch.tensor([1]))
        with pytest.raises(NanError, match=r"the input has it at index \(1, 0\)"):
            pg.broadcast(NAN.to(torch.complex64))
    with dist2.new_group("fake", rank=0, world_size=2, check_nan=False) as pg:
        pg.all_reduce(NAN.clone())


@pytest.mark.parametrize("check_nan", ["no", 1, 0.5])
def test_a_check_that_is_no_bool_is_refused(check_nan: Any) -> None:
    with pytest.raises(InvalidUsageError, match="check_nan must be a bool, got"):
        dist2.new_group("fake", rank=0, world_size=2, check_nan=check_nan)


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    with (
        dist2.new_group("fake", rank=0, world_size=2) as pg,
        pytest.raises(InvalidUsageError, match="hook must be callable, got 3"),
    ):
        pg.register_pre_hook(3)


def test_a_hook_that_calls_an_operation_is_told_so() -> None:
    def body(pg: ProcessGroup) -> None:
        x = torch.ones(2)
        if pg.rank() == 0:
            pg.register_pre_hook(lambda operation, inputs, outputs: pg.barrier())
            with pytest.raises(InvalidUsageError, match=r"a hook of group .* called barrier.*must not call"):
                pg.all_reduce(x)
        else:
            with pytest.raises(GroupRevokedError, match="must not call operations"):
                pg.all_reduce(x)

    run_ranks(2, body, INPROC)
