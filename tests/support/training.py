"""Training under torch's own distributed code, and the same training in one process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dist2 import ProcessGroup
from dist2.torch_backend import default_group

WORLD = 2
STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def alone() -> list[torch.Tensor]:
    """Train on both ranks' batches in one process; return the parameters."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        pairs = [batch(rank, step) for rank in range(WORLD)]
        x, y = (torch.cat(column) for column in zip(*pairs, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def train(net: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@contextlib.contextmanager
def quiet(pg: ProcessGroup | None = None) -> Iterator[None]:
    """Let torch warn of itself; with a group, that is torch's default group inside."""
    with warnings.catch_warnings(), default_group(pg) if pg is not None else contextlib.nullcontext():
        warnings.simplefilter("ignore")
        yield


def mesh_of(pg: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(pg, "cpu", mesh_dim_names=("data",))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Keep torch from timing its guards: for each compilation it empties the CPU's caches, in 30 ms."""
    with mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0):
        yield
