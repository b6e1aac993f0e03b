"""Cost of the control group beside a library: calls of groups with it and without it, in the same processes.

    python -m dist2.run -n 2 benchmarks/control_group.py

The groups take turns in each round. Results are verified; printed are medians over the rounds, and the
fastest rounds, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import ProcessGroup, Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

import dist2

ROUNDS = 31
CALLS = {8: 40, 64 << 10: 20, 1 << 20: 5}
"""Calls in a round, by the bytes of the tensor."""
SETTINGS: dict[str, dict[str, object]] = {
    "control=False": {"control": False},
    "shared memory": {},
    "tcp": {"transport": "tcp"},
}


def plain_gloo(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **options: object
) -> ProcessGroup:
    """Return Gloo as a package would offer it."""
    made = ProcessGroup(store, rank, world_size)
    backend = ProcessGroupGloo(store, rank, world_size, timeout)
    made._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return made


def microseconds(meet: dist2.ProcessGroup, call: Callable[[], object], calls: int) -> float:
    meet.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def exchange(pg: dist2.ProcessGroup, tensor: torch.Tensor) -> None:
    """Send a tensor to the other rank and back."""
    for turn in range(2):
        if pg.rank() == turn:
            pg.send(tensor, 1 - turn)
        else:
            pg.recv(tensor, 1 - pg.rank())


def measured(meet: dist2.ProcessGroup, groups: dict[str, dist2.ProcessGroup]) -> dict[str, dict[str, str]]:
    """Return the medians of each case, by group."""
    for pg in groups.values():
        check = torch.ones(2)
        pg.all_reduce(check)
        assert check.eq(2).all()
    found: dict[str, dict[str, str]] = {}
    for nbytes, calls in CALLS.items():
        ways = {name: partial(pg.all_reduce, torch.zeros(nbytes // 4)) for name, pg in groups.items()}
        found[f"all_reduce {nbytes}"] = _medians(meet, ways, calls)
    exchanges = {name: partial(exchange, pg, torch.zeros(2)) for name, pg in groups.items()}
    found["there and back 8"] = _medians(meet, exchanges, 20)
    return found


def _medians(
    meet: dist2.ProcessGroup, ways: Mapping[str, Callable[[], object]], calls: int
) -> dict[str, str]:
    rounds = [{name: microseconds(meet, way, calls) for name, way in ways.items()} for _ in range(ROUNDS)]
    return {
        name: f"{statistics.median(each[name] for each in rounds):.0f}, "
        f"fastest {min(each[name] for each in rounds):.0f}"
        for name in ways
    }


def main() -> None:
    torch.set_num_threads(1)
    dist2.register_backend("plain_gloo", plain_gloo)
    with ExitStack() as stack:
        meet = stack.enter_context(dist2.new_group("socket", 60))
        for backend in ("gloo", "plain_gloo"):
            groups = {
                name: stack.enter_context(
                    dist2.new_group(backend, 60, **options)  # type: ignore[call-overload]
                )
                for name, options in SETTINGS.items()
            }
            found = measured(meet, groups)
            if meet.rank() == 0:
                json.dump({"backend": backend, "microseconds": found}, sys.stdout, indent=1)
                sys.stdout.write("\n")


if __name__ == "__main__":
    main()
