"""Speed of messages: latency and bandwidth between two processes of one host, beside Gloo.

    python benchmarks/point_to_point.py                          # 8 B to 64 MiB
    python benchmarks/point_to_point.py --sizes 8 268435456 --rounds 9

Latency is half of a ping-pong by `send` and `recv`; bandwidth is that of a window of messages by
`isend` and `irecv`, all outstanding at once, and an answer. Contenders take turns round by round:
torch's Gloo by its process group object, dist2's socket backend as it comes (shared memory), and dist2
held to TCP. Results are checked before anything is timed. ``dist2 bench --ops send_recv`` has MPI
beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from drawing import draw
from harness import TIMEOUT, Referee, in_processes, in_turn, store_at
from rich.console import Console
from rich.table import Table
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

import dist2
from dist2.backends.socket.transport.node import Node
from dist2.cli.bench.report import machine
from dist2.cli.bench.sizes import parse_size, rate_text, ratio_text, size_text, time_text
from dist2.cli.bench.stopping import stop_as_by_ctrl_c

SIZES = tuple(8 << shift for shift in range(0, 24, 3)) + (64 << 20,)
GLOO, SHARED, TCP = "Gloo", "dist2", "dist2 tcp"
LATENCY, BANDWIDTH = "latency", "bandwidth"
WINDOW_BYTES = 64 << 20
WINDOW = 16
RESULTS = Path(__file__).parent / "results"

Works = list[Any]


class Messages(Protocol):
    """A way to exchange messages with the other rank."""

    def send(self, tensor: torch.Tensor) -> object: ...
    def recv(self, tensor: torch.Tensor) -> object: ...
    def isend(self, tensor: torch.Tensor) -> Any: ...
    def irecv(self, tensor: torch.Tensor) -> Any: ...
    def close(self) -> None: ...


class GlooMessages:
    """torch's own backend for CPU tensors."""

    def __init__(self, store: Store, rank: int) -> None:
        self._peer = 1 - rank
        self._group: Any = ProcessGroupGloo(PrefixStore(GLOO, store), rank, 2, TIMEOUT)

    def send(self, tensor: torch.Tensor) -> object:
        return self.isend(tensor).wait()

    def recv(self, tensor: torch.Tensor) -> object:
        return self.irecv(tensor).wait()

    def isend(self, tensor: torch.Tensor) -> Any:
        return self._group.send([tensor], self._peer, 0)

    def irecv(self, tensor: torch.Tensor) -> Any:
        return self._group.recv([tensor], self._peer, 0)

    def close(self) -> None:
        del self._group


class Dist2Messages:
    """dist2's socket backend on a separate node."""

    def __init__(self, name: str, transport: str, store: Store, rank: int) -> None:
        self._node = Node()
        self._group = dist2.new_group(
            "socket",
            TIMEOUT,
            store=PrefixStore(name, store),
            rank=rank,
            world_size=2,
            transport=transport,
            node=self._node,
        )
        peer = 1 - rank
        self.send = partial(self._group.send, dst=peer)
        self.recv = partial(self._group.recv, src=peer)
        self.isend = partial(self._group.isend, dst=peer)
        self.irecv = partial(self._group.irecv, src=peer)

    def close(self) -> None:
        self._group.shutdown()
        self._node.close()


@attrs.frozen
class Figure:
    """Measurements of one size, in one way.

    Attributes:
        kind: `LATENCY` or `BANDWIDTH`.
        nbytes: Of a message.
        rounds_s: For each contender, seconds a message and round.
    """

    kind: str
    nbytes: int
    rounds_s: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        return statistics.median(self.rounds_s[name])


def ping_pong(messages: Messages, rank: int, nbytes: int) -> Callable[[], None]:
    """Return one exchange there and back of one tensor, after a check of its result."""
    tensor = torch.zeros(max(1, nbytes // 4))

    def ping() -> None:
        messages.send(tensor)
        messages.recv(tensor)

    def pong() -> None:
        messages.recv(tensor)
        messages.send(tensor)

    for value in (1.0, 2.0):
        tensor.fill_(value if rank == 0 else -1.0)
        (pong if rank else ping)()
        assert bool((tensor == value).all()), "the received tensor differs from the sent one"
    return pong if rank else ping


def window(messages: Messages, rank: int, nbytes: int) -> Callable[[], None]:
    """Return one exchange of a window of messages and an answer."""
    count = window_of(nbytes)
    tensors = [torch.full((max(1, nbytes // 4),), float(each)) for each in range(count)]
    answer = torch.zeros(1)

    def source() -> None:
        for work in [messages.isend(tensor) for tensor in tensors]:
            work.wait()
        messages.recv(answer)

    def sink() -> None:
        for work in [messages.irecv(tensor) for tensor in tensors]:
            work.wait()
        messages.send(answer)

    if rank:
        for tensor in tensors:
            tensor.fill_(-1.0)
    (sink if rank else source)()
    assert all(bool((tensor == each).all()) for each, tensor in enumerate(tensors)), "mixed up"
    return sink if rank else source


def window_of(nbytes: int) -> int:
    return max(2, min(WINDOW, WINDOW_BYTES // nbytes))


def rank_main(options: argparse.Namespace, rank: int, store_path: str) -> list[Figure]:
    """Measure as one of the two ranks; both return the same."""
    torch.set_num_threads(1)
    store = store_at(store_path, 2)
    referee = Referee(store, rank, 2)
    contenders: dict[str, Messages] = {
        GLOO: GlooMessages(store, rank),
        SHARED: Dist2Messages(SHARED, "auto", store, rank),
        TCP: Dist2Messages(TCP, "tcp", store, rank),
    }
    figures = [
        measure(kind, nbytes, contenders, options.rounds, referee)
        for kind in options.kinds
        for nbytes in options.sizes
    ]
    for contender in contenders.values():
        contender.close()
    return figures


def measure(kind: str, nbytes: int, contenders: dict[str, Messages], rounds: int, referee: Referee) -> Figure:
    """Measure all contenders in turn."""
    bind, messages = (ping_pong, 2) if kind == LATENCY else (window, window_of(nbytes))
    calls = {name: bind(each, referee.rank, nbytes) for name, each in contenders.items()}
    taken = in_turn(calls, rounds, referee)
    return Figure(kind, nbytes, {name: [each / messages for each in times] for name, times in taken.items()})


def show(figures: list[Figure], console: Console) -> None:
    """Print a table for each kind."""
    for kind in dict.fromkeys(figure.kind for figure in figures):
        table = Table("bytes", *(GLOO, SHARED, "x Gloo", TCP, "x Gloo"), title=f"{kind}, medians")
        for figure in figures:
            if figure.kind == kind:
                table.add_row(size_text(figure.nbytes), *cells(figure))
        console.print(table)


def cells(figure: Figure) -> list[str]:
    """Return a row: times or rates, and how many times faster than Gloo."""

    def text(name: str) -> str:
        median_s = figure.median_s(name)
        return time_text(median_s) if figure.kind == LATENCY else rate_text(figure.nbytes / median_s)

    gloo_s = figure.median_s(GLOO)
    row = [text(GLOO)]
    for name in (SHARED, TCP):
        row += [text(name), ratio_text(gloo_s / figure.median_s(name))]
    return row


def panels(figures: list[Figure]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the panels to draw."""
    titles = {LATENCY: "half of a ping-pong", BANDWIDTH: "a window of messages"}
    return {
        titles[kind]: {
            name: [(each.nbytes, each.median_s(name)) for each in figures if each.kind == kind]
            for name in (SHARED, TCP, GLOO)
        }
        for kind in dict.fromkeys(figure.kind for figure in figures)
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES, metavar="SIZE")
    parser.add_argument("--kinds", nargs="+", choices=(LATENCY, BANDWIDTH), default=(LATENCY, BANDWIDTH))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--name", default="point_to_point", help="of the file in benchmarks/results")
    options = parser.parse_args()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")  # for the ranks: loopback only
    with tempfile.TemporaryDirectory(prefix="dist2-bench-") as folder:
        figures = in_processes(partial(rank_main, options), 2, f"{folder}/store")[0]
    console = Console(width=max(100, Console().width))
    show(figures, console)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{options.name}.json"
    document = {"machine": machine(), "figures": [attrs.asdict(figure) for figure in figures]}
    path.write_text(json.dumps(document, indent=1))
    plot = path.with_suffix(".png")
    draw(plot, "Messages between two ranks of a host: time a message", panels(figures))
    console.print(f"saved {path} and {plot}")


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
