"""Process groups as objects: make one, call its operations, close it.

torchrun --nproc-per-node=2 examples/objects.py     # or alone: python examples/objects.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

import dist2


def main() -> None:
    """Run a collective, one in the background, and a message around a ring; check the result of each."""
    # Under torchrun, ranks find each other through the environment. Started by hand, there is one rank.
    alone: dict[str, Any] = {"store": dist2.HashStore(), "rank": 0, "world_size": 1}
    place = {} if "RANK" in os.environ else alone

    with dist2.new_group("socket", timeout=30, **place) as pg:  # closed at the end of the block
        rank, size = pg.rank(), pg.size()

        total = torch.full((4,), float(rank + 1))
        pg.all_reduce(total)  # complete when it returns
        assert total.tolist() == [size * (size + 1) / 2] * 4

        highest = torch.tensor([rank])
        work = pg.all_reduce(highest, dist2.ReduceOp.MAX, async_op=True)
        spare_time = sum(range(1000))  # ... something else meanwhile ...
        work.wait()
        assert highest.item() == size - 1
        assert spare_time == 499500

        sending = pg.isend(torch.tensor([rank]), dst=(rank + 1) % size)
        received = torch.empty(1, dtype=torch.int64)
        pg.recv(received, src=(rank - 1) % size, timeout=5)  # overrides the group's limit
        sending.wait()
        assert received.item() == (rank - 1) % size

        calls = list[str]()

        def note(operation: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
            calls.append(operation.describe())  # an exception here would refuse the call on all ranks

        remove = pg.register_pre_hook(note)
        pg.all_reduce(total, dist2.ReduceOp.AVG)
        remove()
        assert calls[0].startswith("all_reduce(float32[4], op=avg)")

        try:
            pg.broadcast(total, root=size)
        except dist2.InvalidUsageError as error:  # raised before anything is sent; the group stays usable
            refused = str(error)
        pg.barrier()

    print(f"ok: rank {rank} of {size} has the sum {total[0].item():g}; a wrong call raised {refused!r}")


if __name__ == "__main__":
    main()
