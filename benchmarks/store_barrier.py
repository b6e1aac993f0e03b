"""Duration of a barrier of 256 clients over one store server: dist2's beside torch's.

    python benchmarks/store_barrier.py                      # 256 clients
    python benchmarks/store_barrier.py --clients 64 --rounds 30

Each server is a separate process; the clients are threads of this one, which have their connections
before the first round. The barrier is that of torch's helpers: each client adds to a counter, the last
one sets a key, all wait for it. The contenders take turns, and every round is checked. The wait of one client
for one call is measured too. The report has medians over rounds, and their ratio to torch with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed import TCPStore as TorchStore

from dist2.store import TCPStore

RESULTS = Path(__file__).parent / "results" / "store_barrier.json"
LIMIT = timedelta(seconds=120)
CALLS = 200


@attrs.frozen
class Contender:
    """A server, and a client that talks to it.

    Attributes:
        server: "dist2" or "torch".
        client: Likewise.
    """

    server: str
    client: str

    @property
    def name(self) -> str:
        return f"{self.server} server, {self.client} client"


PEER = Contender("torch", "torch")
CONTENDERS = (
    PEER,
    Contender("dist2", "torch"),
    Contender("torch", "dist2"),
    Contender("dist2", "dist2"),
)


def serve(kind: str, pipe: Connection) -> None:
    """Run a server on loopback until the pipe ends it. Runs in a separate process."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    make: Any = TCPStore if kind == "dist2" else TorchStore
    store = make(
        "127.0.0.1",
        port,
        None,
        True,
        LIMIT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    pipe.send(port)
    pipe.recv()
    del store


def connect(kind: str, port: int) -> Any:
    """Return a client."""
    make: Any = TCPStore if kind == "dist2" else TorchStore
    return make("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)


class Team:
    """Threads, each with a client, that meet at barriers when told to."""

    def __init__(self, clients: list[Any]) -> None:
        self.clients = clients
        self._round = ""
        self._arrivals = [0] * len(clients)
        self._start = threading.Barrier(len(clients) + 1)
        self._end = threading.Barrier(len(clients) + 1)
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(len(clients))
        ]
        for thread in self._threads:
            thread.start()

    def meet(self, name: str) -> float:
        """Let all clients meet once; return the seconds from the first to the last.

        Raises:
            AssertionError: A client was let through too early, or not at all.
        """
        self._round = name
        self._start.wait()
        started = time.perf_counter()
        self._end.wait(LIMIT.total_seconds())
        took_s = time.perf_counter() - started
        assert sorted(self._arrivals) == list(range(1, len(self.clients) + 1)), "a client did not come"
        return took_s

    def dismiss(self) -> None:
        """End the threads."""
        self._round = ""
        self._start.wait()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        client = self.clients[index]
        while True:
            self._start.wait()
            name = self._round
            if not name:
                return
            arrived = client.add(f"{name}/count", 1)
            if arrived == len(self.clients):
                client.set(f"{name}/go", str(arrived))
            client.wait([f"{name}/go"])
            self._arrivals[index] = arrived
            self._end.wait()


def call_times(client: Any, name: str) -> dict[str, float]:
    """Return the seconds a call of one client takes alone, by kind of call."""
    client.set(name, "value")
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: client.add(f"{name}/count", 1),
        "set and get": lambda: (client.set(name, "value"), client.get(name)),
        "wait": lambda: client.wait([name]),
    }
    times = {}
    for kind, call in calls.items():
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times[kind] = (time.perf_counter() - started) / CALLS
    return times


def measure(clients: int, rounds: int, console: Console) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by contender and measurement."""
    context = get_context("spawn")
    pipes: dict[str, Connection] = {}
    ports: dict[str, int] = {}
    for kind in ("torch", "dist2"):
        pipes[kind], theirs = context.Pipe()
        context.Process(target=serve, args=(kind, theirs), daemon=True).start()
    for kind, pipe in pipes.items():
        ports[kind] = pipe.recv()
    teams = {
        each: Team([connect(each.client, ports[each.server]) for _ in range(clients)])
        for each in track(CONTENDERS, "connecting", console=console)
    }
    times: dict[str, dict[str, list[float]]] = {each.name: {} for each in CONTENDERS}
    for number in track(range(-2, rounds), "measuring", console=console):
        for contender, team in teams.items():
            name = f"{contender.name}/{number}"
            taken = {"barrier": team.meet(name), **call_times(team.clients[0], f"{name}/alone")}
            if number >= 0:  # the first rounds warm up
                for what, took_s in taken.items():
                    times[contender.name].setdefault(what, []).append(took_s)
    for team in teams.values():
        team.dismiss()
    teams.clear()
    for pipe in pipes.values():
        pipe.send("enough")
    return times


def table(times: dict[str, dict[str, list[float]]], clients: int) -> Table:
    """Return the medians, and in brackets how many times faster than the peer each is."""
    shown = Table(title=f"{clients} clients over one store server: medians")
    shown.add_column("contender")
    for what in times[PEER.name]:
        shown.add_column(f"{what} (ms)" if what == "barrier" else f"{what} (us)", justify="right")
    for name, by_what in times.items():
        cells = []
        for what, taken in by_what.items():
            median = statistics.median(taken)
            ratio = statistics.median(times[PEER.name][what]) / median
            cells.append(f"{median * (1e3 if what == 'barrier' else 1e6):.1f} ({ratio:.2f}x)")
        shown.add_row(name, *cells)
    return shown


def save(times: dict[str, dict[str, list[float]]], clients: int) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "clients": clients,
        "seconds": times,
        "medians": {
            name: {what: statistics.median(taken) for what, taken in by_what.items()}
            for name, by_what in times.items()
        },
    }
    RESULTS.write_text(json.dumps(record, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    console = Console()
    times = measure(options.clients, options.rounds, console)
    console.print(table(times, options.clients))
    save(times, options.clients)
    console.print(f"saved {RESULTS}")


if __name__ == "__main__":
    main()
