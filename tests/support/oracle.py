"""Expected results of collectives, for tests of single modules."""

import functools

import torch

from dist2 import ProcessGroup
from dist2.testing.oracle import example, reduced

__all__ = ["check_sum", "example", "extremes", "reduced"]


def extremes(tensor: torch.Tensor) -> set[float]:
    """Return the least and the greatest element: one value if all elements are equal."""
    return {tensor.min().item(), tensor.max().item()}


@functools.lru_cache(maxsize=8)
def _ramp(numel: int, period: int) -> torch.Tensor:
    return torch.arange(period, dtype=torch.float32).repeat(numel // period + 1)[:numel]


def check_sum(
    pg: ProcessGroup, numel: int, turn: int, period: int = 8, dtype: torch.dtype = torch.float32
) -> None:
    """Sum vectors that differ by rank, turn and element, and check the result.

    Args:
        pg: Of any size.
        numel: Length of the vectors.
        turn: Number of the call.
        period: After so many elements the values repeat. All sums must be exact in the dtype.
        dtype: Of the vectors.
    """
    size, ramp = pg.size(), _ramp(numel, period)
    mine = (ramp + float(pg.rank() + turn)).to(dtype)
    pg.all_reduce(mine, timeout=20)
    assert torch.equal(mine, (size * ramp + float(size * turn + sum(range(size)))).to(dtype))
