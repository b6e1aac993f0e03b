"""One rank of a crew: obeys the coordinator, one JSON object a line on a Unix socket.

Between commands it sleeps in a read, so that it takes no processor time from the crew that is measured,
also where its library would spin in a barrier.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from dist2.cli.bench.contenders import Call, Contender, Dist2, Gloo, Place
from dist2.cli.bench.peers import GLOO
from dist2.cli.bench.workloads import BARRIER, FRESH, HOT, Case, Workload, WrongResultError

LONG = 32 << 20


class Worker:
    """A rank's contenders and the tensors of the current case."""

    def __init__(self, contenders: dict[str, Contender], rank: int, world_size: int) -> None:
        self._contenders = contenders
        self._rank = rank
        self._world_size = world_size
        self._workload: Workload | None = None
        self._calls: dict[str, Call] = {}
        self._others: torch.Tensor | None = None

    def prepare(self, op: str, nbytes: int, shared: bool) -> None:
        """Make the tensors of a case, after those of the last one are gone."""
        self._calls.clear()
        self._workload = None
        self._workload = Workload(Case(op, nbytes, shared), self._rank, self._world_size)

    def verify(self, contender: str) -> str | None:
        """Run the operation twice, a very long one once; return the error in its result, or None.

        Both calls are made even if the first fails: a rank that stopped would leave the others waiting.
        """
        work = self._workload
        assert work is not None
        try:
            call = self._contenders[contender].bind(work)
        except NotImplementedError as error:
            return str(error)
        complaints = []
        for _ in range(2 if work.case.nbytes < LONG else 1):
            work.fill()
            call()
            try:
                work.check()
            except WrongResultError as error:
                complaints.append(str(error))
        work.clear()
        self._calls[contender] = call
        return complaints[0] if complaints else None

    def run(self, contender: str, calls: int, buffers: str) -> float:
        """Return the seconds that a number of calls took in all.

        Args:
            contender: Its name.
            calls: How many.
            buffers: One of `BUFFERS`.
        """
        call, align = self._calls[contender], self._contenders[contender].align
        between = self._between(buffers)
        align()
        start = time.perf_counter()
        if between is None:
            for _ in range(calls):
                call()
            return time.perf_counter() - start
        total = 0.0
        for _ in range(calls):
            between()
            align()
            start = time.perf_counter()
            call()
            total += time.perf_counter() - start
        return total

    def _between(self, buffers: str) -> Call | None:
        """Return what comes before each call, without being timed."""
        work = self._workload
        assert work is not None
        if buffers == HOT or work.case.op == BARRIER:
            return None
        if buffers == FRESH:
            return work.input.zero_
        if self._others is None:
            self._others = torch.zeros(_cache_bytes() // 4)
        return self._others.sum

    def usage(self) -> float:
        """Return the processor seconds that this process has used."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def close(self) -> None:
        """Close all contenders."""
        self._calls.clear()
        for contender in self._contenders.values():
            contender.close()


def _cache_bytes() -> int:
    """Return twice the last cache, within limits: reading as much leaves nothing else there."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    largest = max((int(each.read_text().strip().removesuffix("K")) << 10 for each in sizes), default=0)
    return min(max(2 * largest, 16 << 20), 128 << 20)


def serve(worker: Worker, connection: socket.socket, rank: int) -> None:
    """Answer commands until the coordinator says stop or is gone."""
    commands: dict[str, Callable[..., Any]] = {
        "prepare": worker.prepare,
        "verify": worker.verify,
        "run": worker.run,
        "usage": worker.usage,
    }
    with connection.makefile("rw") as lines:

        def tell(answer: dict[str, object]) -> None:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

        tell({"rank": rank})
        for line in lines:
            name, arguments = json.loads(line)
            if name == "stop":
                return
            try:
                tell({"value": commands[name](*arguments)})
            except Exception as error:
                tell({"error": f"{type(error).__name__}: {error}"})
                raise


def _contenders(names: list[str], options: argparse.Namespace) -> tuple[dict[str, Contender], int]:
    """Return the contenders of this process and its rank."""
    if options.store is None:  # started by an MPI launcher
        from dist2.cli.bench.mpi import Mpi

        mpi = Mpi()
        return {names[0]: mpi}, mpi.rank
    place = Place(FileStore(options.store, options.world_size), options.rank, options.world_size)
    return {name: _contender(name, place) for name in names}, options.rank


def _contender(name: str, place: Place) -> Contender:
    if name == GLOO.name:
        return Gloo(place)
    _, _, rest = name.partition(":")
    transport, _, tuning = rest.partition(":")
    return Dist2(name, place, transport or "auto", tuning or None)


def main() -> None:
    """Join the others of the crew, then serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True, help="path of the coordinator's socket")
    parser.add_argument("--contenders", required=True, nargs="+")
    parser.add_argument("--world-size", required=True, type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", help="file in which ranks meet; none under an MPI launcher")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.control)
        contenders, rank = _contenders(options.contenders, options)
        worker = Worker(contenders, rank, options.world_size)
        serve(worker, connection, rank)
        worker.close()


if __name__ == "__main__":
    main()
