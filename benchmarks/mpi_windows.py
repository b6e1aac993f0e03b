"""Speed of windows of messages of an MPI: the loop of point_to_point.py, by mpi4py.

    python benchmarks/mpi_windows.py                       # each MPI that is here, 8 B to 16 MiB
    python benchmarks/mpi_windows.py --sizes 8 2097152

A window of messages by `Isend` and `Irecv`, all outstanding at once, `Waitall`, and an answer. An MPI needs
processes of its launcher, so they have no tensors of other contenders in their caches. Buffers are
described once. Results are checked before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from harness import ROUND_S
from point_to_point import window_of

from dist2.cli.bench.peers import MPICH, OPEN_MPI, launcher
from dist2.cli.bench.sizes import parse_size, rate_text, size_text, time_text

SIZES = tuple(8 << shift for shift in range(0, 24, 3))


def rank_main(sizes: list[int], rounds: int) -> None:
    """Measure as one of the two ranks that a launcher has started."""
    from mpi4py import MPI  # it starts MPI

    for nbytes in sizes:
        median_s = measure(MPI, nbytes, rounds)
        if MPI.COMM_WORLD.Get_rank() == 0:
            print(f"{size_text(nbytes):>10} {time_text(median_s):>12} {rate_text(nbytes / median_s):>12}")


def measure(mpi: Any, nbytes: int, rounds: int) -> float:
    """Return the median over rounds of the seconds a message takes."""
    comm, count = mpi.COMM_WORLD, window_of(nbytes)
    rank = comm.Get_rank()
    peer = 1 - rank
    arrays = [np.full(max(1, nbytes // 4), -1 if rank else each, np.float32) for each in range(count)]
    buffers = [[array, mpi.FLOAT] for array in arrays]
    answer = [np.zeros(1, np.float32), mpi.FLOAT]

    def window() -> None:
        if rank:
            mpi.Request.Waitall([comm.Irecv(each, peer) for each in buffers])
            comm.Send(answer, peer)
        else:
            mpi.Request.Waitall([comm.Isend(each, peer) for each in buffers])
            comm.Recv(answer, peer)

    def taken_s(calls: int) -> float:
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            window()
        return (time.perf_counter() - start) / calls

    window()
    assert all(bool((array == each).all()) for each, array in enumerate(arrays)), "mixed up"
    calls = comm.bcast(max(3, int(ROUND_S / taken_s(3))), 0)
    return statistics.median(taken_s(calls) for _ in range(rounds)) / count


def main() -> None:
    """Start the ranks of each MPI that is here, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES, metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--started", action="store_true", help="by a launcher: be a rank")
    options = parser.parse_args()
    if options.started:
        rank_main(list(options.sizes), options.rounds)
        return
    for mpi in (OPEN_MPI, MPICH):
        how = launcher(mpi, os.environ.get("LD_LIBRARY_PATH"))
        if how is None:
            print(f"{mpi.title} is not here: {mpi.install}")
            continue
        print(f"{mpi.title}: a window, time and bandwidth of a message, medians", flush=True)
        rest = ["--sizes", *map(str, options.sizes), "--rounds", str(options.rounds), "--started"]
        command = [*how.command, "-n", "2", sys.executable, __file__, *rest]
        subprocess.run(command, env={**os.environ, **how.environment}, check=True)


if __name__ == "__main__":
    main()
