"""Pipeline parallel: each rank has a stage, and microbatches follow each other (GPipe)."""

from __future__ import annotations

import copy

import torch
from job import job, report
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, ROWS, MICROBATCHES = 12, 16, 4


def main() -> None:
    """Compare loss and gradients of the pipeline with those of the whole model."""
    with job() as (rank, size):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size)]
        whole = nn.Sequential(*copy.deepcopy(layers))
        rows, wanted = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=wanted, losses=losses) if rank == size - 1 else schedule.step()
        expected = nn.functional.mse_loss(whole(rows), wanted)
        expected.backward()
        if rank == size - 1:
            torch.testing.assert_close(torch.stack(losses).mean(), expected.detach())
        for mine, theirs in zip(layers[rank].parameters(), whole[rank].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        report(f"{size} stages give the gradients of the whole model")


if __name__ == "__main__":
    main()
