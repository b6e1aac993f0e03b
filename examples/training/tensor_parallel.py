"""Tensor parallel: the two layers of a block are cut by columns and by rows, as DTensors."""

from __future__ import annotations

import copy

import torch
from job import job, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 16


class Block(nn.Module):
    """Two layers with a nonlinearity between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(rows)))
        return out


def main() -> None:
    """Compare output and gradients of the parallel block with those of the whole one."""
    with job() as (_, size):
        whole = Block()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallel = parallelize_module(copy.deepcopy(whole), init_device_mesh("cpu", (size,)), plan)
        rows = torch.randn(4, WIDTH)
        expected, got = whole(rows), parallel(rows)
        torch.testing.assert_close(got, expected)
        expected.square().sum().backward()
        got.square().sum().backward()
        for name, parameter in parallel.named_parameters():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            torch.testing.assert_close(gradient.full_tensor(), whole.get_parameter(name).grad)
        report(f"{size} ranks give the output and the gradients of the whole block")


if __name__ == "__main__":
    main()
