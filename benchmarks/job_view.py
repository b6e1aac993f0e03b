"""How long does `/job` of N ranks take? Control planes of N ranks on this machine, several in each process.

The ranks' groups are of the backend `fake`: nothing but control planes runs. All ranks share the cores of
this machine, so the time grows with N; on a cluster each rank answers on its own host. The last lines give
the time of the asking rank alone (it reads all answers), and the number of rounds of the tree.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection

import dist2
import observability
from observability.client import Asker
from observability.job.diagnosis import diagnose
from observability.job.gathering import FAN_OUT
from observability.job.lines import decoded, encoded
from observability.job.state import PROTOCOL


def planes(pipe: Connection, port: int, ranks: Iterable[int], world_size: int) -> None:
    """Run the control planes of some ranks until told to end; say where they are."""
    store = dist2.TCPStore("127.0.0.1", port, is_master=False)
    groups, servers = [], []
    for rank in ranks:
        pg = dist2.new_group("fake", 60, store=store, rank=rank, world_size=world_size)
        groups.append(pg)
        servers.append(observability.start(pg))
    pipe.send([(server.url, server.token) for server in servers])
    pipe.recv()
    for server in servers:
        server.close()
    for pg in groups:
        pg.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(
        "--limit-ms", type=int, default=1000, help="of each rank: more where they share cores"
    )
    arguments = parser.parse_args()
    world_size, context = arguments.ranks, multiprocessing.get_context("spawn")
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began, pipes, processes = time.monotonic(), [], []
    for index in range(arguments.processes):
        ours, theirs = context.Pipe()
        ranks = range(index, world_size, arguments.processes)
        process = context.Process(target=planes, args=(theirs, store.port, ranks, world_size))
        process.start()
        pipes.append(ours)
        processes.append(process)
    where = [pipe.recv() for pipe in pipes]
    time.sleep(2.0)  # every rank enters the directory within its first second
    took_s = time.monotonic() - began
    print(f"{world_size} control planes in {arguments.processes} processes after {took_s:.1f} s")
    for url, token in (where[0][0], where[-1][-1]):
        took, answers = [], b""
        for _ in range(arguments.times):
            start = time.perf_counter()
            answers = observability.fetch(f"{url}/job?limit_ms={arguments.limit_ms}", token, timeout_s=60)
            took.append(time.perf_counter() - start)
        job = json.loads(answers)
        assert job["answered"] == world_size, job["answered"]
        text = ", ".join(f"{each * 1e3:.0f}" for each in took)
        median_ms = statistics.median(took) * 1e3
        print(f"rank {job['asked_rank']}: {len(answers) / 1024:.0f} KiB in {text} ms, median {median_ms:.0f}")
    model(where[0][0])
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()


def model(plane: tuple[str, str]) -> None:
    """Print the time of the asking rank alone for N answers, and the number of rounds."""
    url, token = plane
    row = json.loads(observability.fetch(f"{url}/job", token, timeout_s=60))["ranks"][0]
    body = {"protocol": PROTOCOL, "what": {}, "limit_s": 1, "entries": []}
    answer = Asker().ask(f"{url}/job/gather", token, body=body)
    head, lines = decoded(answer)
    (own,) = lines.values()
    for count in (64, 1_000, 10_000):
        text = encoded(head, dict.fromkeys(range(count), own))
        start = time.perf_counter()
        read = {rank: line.answer(url) for rank, line in decoded(text)[1].items()}
        diagnose(read, 5.0)
        json.dumps([row] * count)
        alone_s = time.perf_counter() - start
        rounds, left = 0, count - 1
        while left > 0:
            left //= FAN_OUT
            rounds += 1
        size = f"{len(text) / 2**20:.1f} MiB of answers"
        print(f"{count} ranks: {size}, {alone_s * 1e3:.0f} ms to read and judge, {rounds} rounds")


if __name__ == "__main__":
    main()
