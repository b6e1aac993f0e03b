"""Parameter averaging: each rank trains alone, and every few steps all take the mean of their parameters."""

from __future__ import annotations

import torch
from job import equal_on_all_ranks, job, report
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

PERIOD, STEPS = 4, 40


def main() -> None:
    """Fit a line; check that parameters are equal exactly after the averages."""
    with job() as (rank, _):
        model = nn.Linear(3, 1)
        wanted = torch.tensor([[1.0, -2.0, 0.5]])
        averager = PeriodicModelAverager(period=PERIOD)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            rows = torch.randn(16, 3, generator=generator)
            nn.functional.mse_loss(model(rows), rows @ wanted.T).backward()
            optimizer.step()
            averager.average_parameters(list(model.parameters()))  # of those that have a gradient
            optimizer.zero_grad()
            if 0 < step < 3 * PERIOD:
                assert equal_on_all_ranks(model.weight) == (step % PERIOD == 0), step
        error = (model.weight - wanted).abs().max().item()
        assert error < 0.05, error
        report(f"error {error:.4f} after {STEPS} steps, an average every {PERIOD}")


if __name__ == "__main__":
    main()
