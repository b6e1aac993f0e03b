"""``async_op=True`` of `dist2.functional`: results that wait when they are first read."""

from __future__ import annotations

import copy
import io
import threading
from functools import partial

import numpy as np
import pytest
import torch
from functional.test_gradients import CASES, WORLD, check_gradient
from support.ranks import TENANTS, Tenant, run_ranks

from dist2 import ProcessGroup, ReduceOp, functional

INPROC = TENANTS[0]


def test_a_call_returns_before_the_others_have_called() -> None:
    called = threading.Event()

    def body(pg: ProcessGroup) -> None:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        if pg.rank() == 1:
            assert called.wait(10)
        y = functional.all_reduce(x * 3, pg, async_op=True)
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, True)
        called.set()
        z = y.square()
        assert type(z) is torch.Tensor
        assert z.tolist() == [36, 144]
        z.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [72, 144]

    run_ranks(2, body, INPROC)


@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_results_and_gradients_of_all_functions(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(functional.__all__) - {"wait"}:
        monkeypatch.setattr(functional, name, partial(getattr(functional, name), async_op=True))

    def body(pg: ProcessGroup) -> None:
        for name, function in CASES.items():
            check_gradient(name, function, pg)

    run_ranks(WORLD, body, tenant)


def test_a_backward_pass_without_a_read_waits() -> None:
    def body(pg: ProcessGroup) -> None:
        x = torch.tensor([2.0 + pg.rank()], requires_grad=True)
        functional.all_reduce(x, pg, ReduceOp.PRODUCT, async_op=True).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2 * (3.0 - pg.rank())]

    run_ranks(2, body, INPROC)


def test_several_overlap_and_follow_each_other() -> None:
    def body(pg: ProcessGroup) -> None:
        x = torch.ones(4)
        first = [functional.all_reduce(x * k, pg, async_op=True) for k in range(5)]
        second = [functional.all_reduce(y, pg, async_op=True) for y in first]
        assert torch.stack(second).sum(1).tolist() == [16.0 * k for k in range(5)]

    run_ranks(2, body, INPROC)


def test_code_that_reads_memory() -> None:
    def body(pg: ProcessGroup) -> None:
        def fresh() -> torch.Tensor:
            return functional.all_reduce(torch.ones(2), pg, async_op=True)

        assert fresh().tolist() == [2, 2]
        assert fresh().numpy().tolist() == np.asarray(fresh()).tolist() == np.from_dlpack(fresh()).tolist()
        assert repr(fresh()) == "tensor([2., 2.])"
        assert fresh().add_(1).tolist() == [3, 3]
        assert copy.deepcopy(fresh()).tolist() == [2, 2]
        file = io.BytesIO()
        torch.save(fresh(), file)
        file.seek(0)
        assert torch.load(file).tolist() == [2, 2]
        y = fresh()
        waited = functional.wait(y)
        assert (type(waited), waited.data_ptr()) == (torch.Tensor, y.data_ptr())
        assert functional.wait(waited) is waited
        pg.all_reduce(waited)
        assert y.tolist() == [4, 4]

    run_ranks(2, body, INPROC)


def test_torch_func() -> None:
    def body(pg: ProcessGroup) -> None:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return functional.all_gather(x, pg, async_op=True).square().sum()

        batch = torch.ones(3, 2)
        assert torch.func.grad(loss)(batch[0]).tolist() == [4, 4]
        assert torch.vmap(torch.func.grad(loss))(batch).tolist() == [[4, 4]] * 3

    run_ranks(2, body, INPROC)


def test_the_first_read_raises_the_error() -> None:
    def body(pg: ProcessGroup) -> None:
        y = functional.all_reduce(torch.ones(2 + pg.rank()), pg, async_op=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shape differs"):
                y.sum()

    run_ranks(2, body, INPROC)
