"""Time of operations of a group of the backend ``mpi``, and of mpi4py, in the same processes.

    mpiexec -n 2 python benchmarks/mpi.py

All take turns in each round. Results are verified; printed are medians over the rounds, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

import dist2

ROUNDS = 9
CALLS = {8: 500, 64 << 10: 100, 1 << 20: 20, 64 << 20: 1}
"""Calls in a round, by the bytes of the tensor."""


def microseconds(call: Callable[[], object], calls: int) -> float:
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def reductions(pg: dist2.ProcessGroup, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return the sum of a tensor over all ranks, by both; zeros stay zeros."""
    tensor, comm = torch.zeros(nbytes // 4), MPI.COMM_WORLD
    check = torch.ones(nbytes // 4)
    pg.all_reduce(check)
    assert check.eq(pg.size()).all()
    return {
        "dist2": lambda: pg.all_reduce(tensor),
        "mpi4py": lambda: comm.Allreduce(MPI.IN_PLACE, [tensor, MPI.FLOAT]),
    }


def exchanges(pg: dist2.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Return 8 bytes to the other rank and back, by both."""
    tensor, comm, other = torch.zeros(2), MPI.COMM_WORLD, 1 - pg.rank()

    def by_dist2() -> None:
        for turn in range(2):
            if pg.rank() == turn:
                pg.send(tensor, other)
            else:
                pg.recv(tensor, other)

    def by_mpi() -> None:
        for turn in range(2):
            if pg.rank() == turn:
                comm.Send([tensor, MPI.FLOAT], other)
            else:
                comm.Recv([tensor, MPI.FLOAT], other)

    return {"dist2": by_dist2, "mpi4py": by_mpi}


def main() -> None:
    torch.set_num_threads(1)
    with dist2.new_group("mpi", 60) as pg:
        cases = {f"all_reduce {nbytes}": (reductions(pg, nbytes), calls) for nbytes, calls in CALLS.items()}
        if pg.size() == 2:
            cases["there and back 8"] = (exchanges(pg), 500)
        found: dict[str, dict[str, float]] = {}
        for name, (ways, calls) in cases.items():
            rounds = [{way: microseconds(call, calls) for way, call in ways.items()} for _ in range(ROUNDS)]
            found[name] = {way: round(statistics.median(each[way] for each in rounds), 2) for way in ways}
        if pg.rank() == 0:
            library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
            json.dump({"library": library, "ranks": pg.size(), "microseconds": found}, sys.stdout, indent=1)
            sys.stdout.write("\n")


if __name__ == "__main__":
    main()
