"""Groups made from groups, and the current group: functions need no argument for their group.

torchrun --nproc-per-node=4 examples/split_and_context.py
"""

from __future__ import annotations

import os
from typing import Any

import torch

import dist2


def mean(value: float) -> float:
    """Return the mean over the ranks of the current group."""
    pg = dist2.current_process_group()
    assert pg is not None, "call this inside `with dist2.process_group(pg):`"
    tensor = torch.tensor([value], dtype=torch.float64)
    pg.all_reduce(tensor, dist2.ReduceOp.AVG)
    return tensor.item()


def main() -> None:
    """Take means over the world, over halves of it, and over two named ranks."""
    alone: dict[str, Any] = {"store": dist2.HashStore(), "rank": 0, "world_size": 1}
    place = {} if "RANK" in os.environ else alone

    with dist2.new_group("socket", timeout=30, **place) as world:
        rank, size = world.rank(), world.size()

        # Each rank passes a color; ranks with equal colors form a group. No new connections are made.
        half = world.split_by(color=rank % 2)
        assert half is not None

        with dist2.process_group(world):
            of_all = mean(rank)
            with dist2.process_group(half):  # blocks nest
                of_half = mean(rank)
            assert mean(rank) == of_all  # the world is the current group again
        assert dist2.current_process_group() is None

        assert of_all == (size - 1) / 2
        assert of_half == sum(half.global_ranks) / half.size()

        # Or list the ranks; others get None, and need not call.
        ends = world.split(sorted({0, size - 1}), name="ends")
        if ends is not None:
            with ends, dist2.process_group(ends):
                assert mean(rank) == (size - 1) / 2
        half.shutdown()
        world.barrier()

    print(f"ok: rank {rank} of {size} has the mean {of_all:g} of all and {of_half:g} of its half")


if __name__ == "__main__":
    main()
