"""Cost of a call whose code and data were evicted from the caches by other processes.

    python benchmarks/cold_calls.py                # four processes take turns on one core

Where ranks outnumber cores, a rank that comes to a fence hands its core to another, and finds its own code
and memory gone from the nearest caches when it comes back. Here the ranks have nothing to do with each other:
each calls a group of one on the `fake` backend, whose operations do nothing, and yields the core. It prints
the processor time of a call, less that of a yield alone; and that of calls without a yield.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

import dist2

ROUNDS = 5
CALLS = 2000

Times = dict[str, list[tuple[float, float]]]
"""Cold and warm microseconds of each round, by the kind of call."""


def processor_us(call: Callable[[], object], between: Callable[[], object]) -> float:
    """Return the processor time of a call and of the code between two calls."""
    start = time.process_time_ns()
    for _ in range(CALLS):
        call()
        between()
    return (time.process_time_ns() - start) / CALLS / 1000


def nothing() -> None:
    pass


def measure(core: int, together: Barrier, found: Any) -> None:
    """Run as one of the processes."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    tensor = torch.zeros(2)
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        calls: dict[str, Callable[[], object]] = {
            "nothing": nothing,
            "barrier": pg.barrier,
            "all_reduce": partial(pg.all_reduce, tensor),
            "all_reduce, timeout=5.0": partial(pg.all_reduce, tensor, timeout=5.0),
        }
        times: Times = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                call()
                together.wait()
                cold = processor_us(call, os.sched_yield)
                together.wait()
                times[name].append((cold, processor_us(call, nothing)))
        found.put(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    context = get_context("spawn")
    together, queue = context.Barrier(options.processes), context.Queue()
    processes = [
        context.Process(target=measure, args=(options.core, together, queue))
        for _ in range(options.processes)
    ]
    for process in processes:
        process.start()
    found: list[Times] = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    print(
        f"{options.processes} processes on core {options.core}, microseconds of processor time, lowest round"
    )
    print(f"{'':<26}{'cold':>8}{'warm':>8}")
    idle = [0.0, 0.0]
    for name in found[0]:
        lowest = [
            min(statistics.mean(times[name][index][way] for times in found) for index in range(ROUNDS))
            for way in (0, 1)
        ]
        if name == "nothing":
            idle = lowest
            continue
        print(f"{name:<26}" + "".join(f"{us - less:>8.2f}" for us, less in zip(lowest, idle, strict=True)))


if __name__ == "__main__":
    main()
