"""A tensor-parallel MLP with `dist2.functional`: each rank has a part of each layer's weights.

torchrun --nproc-per-node=2 examples/tensor_parallel.py

The first layer is cut by columns, the second by rows, so that one all_reduce in the forward pass and one
reduce in the backward pass suffice. The gradients are compared with those of the whole model on one rank.
"""

from __future__ import annotations

import torch
from torch import nn

import dist2
from dist2 import functional

WIDTH, HIDDEN, BATCH = 8, 16, 4


class ParallelMlp(nn.Module):
    """An MLP of which this rank has ``HIDDEN / size`` of the hidden units."""

    def __init__(self, whole: nn.Sequential, pg: dist2.ProcessGroup) -> None:
        super().__init__()
        rank, size = pg.rank(), pg.size()
        self.pg = pg
        up, down = whole.parameters()
        self.up = nn.Parameter(up.detach().chunk(size)[rank].clone())
        self.down = nn.Parameter(down.detach().chunk(size, dim=1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the whole MLP, on every rank."""
        x = functional.broadcast(x, self.pg)  # its backward pass adds up the ranks' gradients of x
        hidden = torch.relu(nn.functional.linear(x, self.up))
        return functional.all_reduce(nn.functional.linear(hidden, self.down), self.pg)


def main() -> None:
    """Compare a forward and a backward pass of both models, and once more compiled to one graph."""
    with dist2.new_group("socket", timeout=60) as pg:
        rank, size = pg.rank(), pg.size()
        torch.manual_seed(1)  # the same model and batch on all ranks
        up, down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        whole = nn.Sequential(up, nn.ReLU(), down)
        batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

        x = batch.clone().requires_grad_()
        nn.functional.mse_loss(whole(x), target).backward()
        assert up.weight.grad is not None
        assert down.weight.grad is not None
        expected = up.weight.grad.chunk(size)[rank], down.weight.grad.chunk(size, dim=1)[rank]

        model = ParallelMlp(whole, pg)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for forward in (model, compiled):
            model.zero_grad()
            ours = batch.clone().requires_grad_()
            # Every rank has the same loss; gradients are those of the sum of all ranks' losses.
            loss = nn.functional.mse_loss(forward(ours), target) / size
            loss.backward()
            torch.testing.assert_close((model.up.grad, model.down.grad), expected)
            if rank == 0:
                torch.testing.assert_close(ours.grad, x.grad)
    units = f"{HIDDEN // size} of {HIDDEN} hidden units"
    print(f"ok: rank {rank} of {size} has {units}, and the gradients of one model")


if __name__ == "__main__":
    main()
