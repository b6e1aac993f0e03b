"""One rank of `hosts.py`, inside a network namespace: measures the given cases and prints JSON at the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import TIMEOUT, Referee
from namespaces import INTERFACE
from torch.distributed import FileStore, PrefixStore, Store

import dist2
from dist2.backends.socket.transport.node import Node
from dist2.cli.bench import contenders
from dist2.cli.bench.workloads import SEND_RECV, Case, Workload

ROUND_S = 0.05
STREAM = "stream"
"""Messages one way from the first rank to the first of the last host: large ones for bandwidth."""
STREAM_MESSAGES = 8


class Dist2(contenders.Dist2):
    """dist2 as it finds hosts by itself, bound to an address of the namespace."""

    def __init__(self, place: contenders.Place, address: str) -> None:
        self._node = Node(address)
        self._group = dist2.new_group(
            "socket",
            TIMEOUT,
            store=PrefixStore("dist2", place.store),
            rank=place.rank,
            world_size=place.world_size,
            node=self._node,
        )

    def pair(self, work: Workload, peer: int, first: bool, stream: bool) -> Callable[[], object]:
        """Return this rank's side of a ping-pong, or of a stream of messages with an answer at its end."""
        pg, tensor, token = self._group, work.input, torch.zeros(1)
        count = STREAM_MESSAGES if stream else 1
        answer = token if stream else tensor

        def ping() -> None:
            for _ in range(count):
                pg.send(tensor, peer)
            pg.recv(answer, peer)

        def pong() -> None:
            for _ in range(count):
                pg.recv(tensor, peer)
            pg.send(answer, peer)

        return ping if first else pong


class Gloo(contenders.Gloo):
    """torch's own backend, bound to the interface that the environment names."""

    def pair(self, work: Workload, peer: int, first: bool, stream: bool) -> Callable[[], object]:
        """Return this rank's side of a ping-pong or stream."""
        pg, tensor, token = self._group, work.input, torch.zeros(1)
        count = STREAM_MESSAGES if stream else 1
        answer = token if stream else tensor

        def ping() -> None:
            for _ in range(count):
                pg.send([tensor], peer, 0).wait()
            pg.recv([answer], peer, 0).wait()

        def pong() -> None:
            for _ in range(count):
                pg.recv([tensor], peer, 0).wait()
            pg.send([answer], peer, 0).wait()

        return ping if first else pong


def bytes_sent() -> int:
    """Return the bytes that this host has put on the wire so far, headers of all layers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


class Run:
    """The measurements of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rank, self._world_size = options.rank, options.ranks
        store: Store = FileStore(options.store, options.ranks)
        place = contenders.Place(store, options.rank, options.ranks)
        self._referee = Referee(store, options.rank, options.ranks)
        self._contenders: dict[str, Dist2 | Gloo] = {
            "dist2": Dist2(place, options.address),
            "Gloo": Gloo(place),
        }

    def measure(self, op: str, nbytes: int) -> dict[str, object]:
        """Return seconds a call by contender and round, and bytes on the wire of the first host."""
        work = Workload(Case(SEND_RECV if op == STREAM else op, nbytes), self._rank, self._world_size)
        found: dict[str, object] = {"op": op, "nbytes": nbytes}
        calls = {name: self._bind(name, work, op) for name in self._contenders}
        for call in calls.values():
            if op not in (SEND_RECV, STREAM):
                work.fill()
                call()
                work.check()
        work.clear()
        counts = {name: self._calls(call) for name, call in calls.items()}
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        sent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self._options.rounds):
            for name, call in calls.items():
                took, wire = self._round(call, counts[name])
                rounds[name].append(took)
                sent[name].append(wire)
        return {**found, "rounds_s": rounds, "sent": sent}

    def _bind(self, name: str, work: Workload, op: str) -> Callable[[], object]:
        contender = self._contenders[name]
        if op not in (SEND_RECV, STREAM):
            return contender.bind(work)
        # The first ranks of the first and the last host.
        far = self._world_size - self._options.beside
        if self._rank not in (0, far):
            return lambda: None
        return contender.pair(work, far if self._rank == 0 else 0, self._rank == 0, op == STREAM)

    def _calls(self, call: Callable[[], object]) -> int:
        self._round(call, 2)
        took, _ = self._round(call, 2)
        # Ranks do not start a round at the same moment: many calls, where they are short, hide that.
        return max(20 if took < ROUND_S else 1, min(500, int(ROUND_S / took)))

    def _round(self, call: Callable[[], object], count: int) -> tuple[float, float]:
        """Return seconds and bytes that left the first host, a call."""
        before = bytes_sent()
        self._referee.latest(0.0)
        start = time.perf_counter()
        for _ in range(count):
            call()
        took = self._referee.latest((time.perf_counter() - start) / count)
        sent = (bytes_sent() - before) / count if self._rank == 0 else 0.0
        return took, sent

    def close(self) -> None:
        """Give everything back."""
        for contender in self._contenders.values():
            contender.close()


def main() -> None:
    """Measure as one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rank", "ranks", "beside", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("store", "address", "cases"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    run = Run(options)
    found = [run.measure(op, nbytes) for op, nbytes in json.loads(options.cases)]
    run.close()
    if options.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
