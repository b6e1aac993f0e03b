"""Failures on a GPU: deadlines, deaths, mismatches, aborts, and how the others go on; training steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from support.gpu_ranks import DIED, run_on_gpu

from dist2 import (
    GroupAbortedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    PrefixStore,
    ProcessGroup,
)
from dist2.errors import Dist2Error


def total(pg: ProcessGroup) -> float:
    mine = torch.ones(5, device="cuda")
    pg.all_reduce(mine)
    return mine[0].item()


def timeout(pg: ProcessGroup) -> float:
    total(pg)
    if pg.rank() == 0:
        work = pg.all_reduce(torch.ones(5, device="cuda"), async_op=True, timeout=1.0)
        with pytest.raises(OperationTimeoutError) as caught:
            work.wait(20)
        assert caught.value.missing == (1,)
        torch.cuda.synchronize()  # the device is free again
        PrefixStore("t", pg.spec.store).set("over", "")
    else:
        PrefixStore("t", pg.spec.store).wait(["over"])
    smaller = pg.shrink()
    return total(smaller)


def test_a_deadline_frees_the_device_and_the_group_shrinks(tmp_path: Path) -> None:
    assert run_on_gpu(2, timeout, tmp_path) == [2.0, 2.0]


def death(pg: ProcessGroup) -> float:
    total(pg)
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        while time.monotonic() - start < 20:
            pg.all_reduce(torch.ones(5, device="cuda"), async_op=True).wait(20)
    assert caught.value.ranks == (1,)
    torch.cuda.synchronize()
    return total(pg.shrink())


def test_survivors_of_a_death_go_on(tmp_path: Path) -> None:
    assert run_on_gpu(3, death, tmp_path) == [2.0, DIED, 2.0]


def mismatch(pg: ProcessGroup) -> str:
    total(pg)
    with pytest.raises(MismatchError) as caught:
        pg.all_reduce(torch.ones(1000 + pg.rank(), device="cuda"), async_op=True).wait(20)
        pg.barrier()
    torch.cuda.synchronize()
    return str(caught.value)


def test_a_mismatch_is_told_on_all_ranks(tmp_path: Path) -> None:
    for text in run_on_gpu(2, mismatch, tmp_path):
        assert "float32[1000]" in text and "float32[1001]" in text


def abort(pg: ProcessGroup) -> float:
    total(pg)
    part = pg.split(range(pg.size()))
    assert part is not None
    if pg.rank() == 0:
        work = part.all_reduce(torch.ones(5, device="cuda"), async_op=True)
        part.abort()
        with pytest.raises(GroupAbortedError):
            work.wait(20)
        torch.cuda.synchronize()
    else:
        with pytest.raises(Dist2Error):
            while True:
                part.all_reduce(torch.ones(5, device="cuda"), async_op=True).wait(20)
        torch.cuda.synchronize()
        part.abort()
    return total(pg)


def test_an_abort_frees_the_device_and_other_groups_go_on(tmp_path: Path) -> None:
    assert run_on_gpu(2, abort, tmp_path) == [2.0, 2.0]


def first_message(pg: ProcessGroup) -> float:
    if pg.rank() == 0:
        with pytest.raises(OperationTimeoutError) as caught:
            pg.send(torch.ones(5, device="cuda"), 1, timeout=1.0)
        assert caught.value.missing == (1,)
        torch.cuda.synchronize()
        PrefixStore("t", pg.spec.store).set("over", "")
    else:
        PrefixStore("t", pg.spec.store).wait(["over"])
    return total(pg.shrink())


def test_a_first_message_that_no_rank_receives_frees_the_device(tmp_path: Path) -> None:
    assert run_on_gpu(2, first_message, tmp_path) == [2.0, 2.0]


def device_error(pg: ProcessGroup) -> None:
    total(pg)
    if pg.rank() == 1:
        with pytest.raises(Dist2Error):
            while True:
                pg.all_reduce(torch.ones(5, device="cuda"), async_op=True).wait(20)
        return
    tensor = torch.zeros(5, device="cuda")
    # An index out of bounds: the kernel fails, and so do later calls.
    tensor[torch.tensor([7], device="cuda")] = 1.0
    with pytest.raises(Exception, match="device-side assert"):
        while True:
            pg.all_reduce(tensor, async_op=True).wait(20)


def test_a_kernel_that_fails_is_told_on_all_ranks(tmp_path: Path) -> None:
    run_on_gpu(2, device_error, tmp_path)


def ddp(pg: ProcessGroup) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4).cuda(), process_group=pg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(pg.rank() + step), device="cuda")).sum().backward()
        optimizer.step()
    return [each.sum().item() for each in model.parameters()]


def fsdp(pg: ProcessGroup) -> list[float]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import dist2.torch_backend

    torch.manual_seed(0)
    with dist2.torch_backend.default_group(pg):
        model = torch.nn.Linear(8, 4).cuda()
        fully_shard(model, mesh=DeviceMesh.from_group(pg, "cuda"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 8), float(pg.rank() + step), device="cuda")).sum().backward()
            optimizer.step()
        return [each.full_tensor().sum().item() for each in model.parameters()]  # type: ignore[attr-defined]  # DTensors


@pytest.mark.parametrize("body", [ddp, fsdp])
def test_training_steps(body: object, tmp_path: Path) -> None:
    first, second = run_on_gpu(2, body, tmp_path)  # type: ignore[arg-type]  # one of the two above
    assert first == second
