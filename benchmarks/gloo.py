"""Is dist2 faster than Gloo? Every collective and a ping-pong, 8 B to 16 MiB, between processes of one host.

    python benchmarks/gloo.py                       # two ranks, all operations
    python benchmarks/gloo.py --ops all_reduce --sizes 8 65536 --rounds 9

Contenders: torch's Gloo by its process group object (not through the slower global functions), dist2's
socket backend as it comes (shared memory), and dist2 held to TCP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial

import report
import torch
from harness import TIMEOUT, Measurement, Referee, in_processes, measure, store_at
from neighbours import Patience
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed import PrefixStore, ProcessGroupGloo, Store
from workloads import OPERATIONS, ROOT, SEND_RECV, Case, Workload

import dist2
from dist2.backends.socket.transport.node import Node

GLOO = "Gloo"
SIZES = tuple(8 << shift for shift in range(0, 22, 3))
"""8 B to 16 MiB."""


class Gloo:
    """torch's own backend for CPU tensors."""

    name = GLOO

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._group = ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, TIMEOUT)

    def bind(self, work: Workload) -> Callable[[], object]:
        pg, tensor, output, peer = self._group, work.input, work.output, 1 - work.rank
        inputs, outputs, mine = work.input_parts, work.output_parts, work.rank == ROOT
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: pg.allreduce(tensor).wait(),
            "broadcast": lambda: pg.broadcast(tensor, ROOT).wait(),
            "reduce": lambda: pg.reduce(tensor, ROOT).wait(),
            "all_gather": lambda: pg.allgather(outputs, tensor).wait(),
            "all_gather_single": lambda: pg._allgather_base(output, tensor).wait(),
            "reduce_scatter": lambda: pg.reduce_scatter(output, inputs).wait(),
            "reduce_scatter_single": lambda: pg._reduce_scatter_base(output, tensor).wait(),
            "gather": lambda: pg.gather(outputs if mine else [], tensor, ROOT).wait(),
            "scatter": lambda: pg.scatter(output, inputs if mine else [], ROOT).wait(),
            "all_to_all": lambda: pg.alltoall(outputs, inputs).wait(),
            "all_to_all_single": lambda: pg.alltoall_base(output, tensor, [], []).wait(),
            "barrier": lambda: pg.barrier().wait(),
        }

        def ping() -> None:
            pg.send([tensor], peer, 0).wait()
            pg.recv([tensor], peer, 0).wait()

        def pong() -> None:
            pg.recv([tensor], peer, 0).wait()
            pg.send([tensor], peer, 0).wait()

        return _played(work, calls, ping, pong)

    def close(self) -> None:
        del self._group


class Dist2:
    """dist2's socket backend, over the transport that it chooses or is told."""

    def __init__(self, name: str, transport: str, store: Store, rank: int, world_size: int) -> None:
        self.name = name
        # Links belong to processes: without a node of its own, a group would use those of the other one.
        self._node = Node()
        self._group = dist2.new_group(
            "socket",
            TIMEOUT,
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            transport=transport,
            node=self._node,
        )

    def bind(self, work: Workload) -> Callable[[], object]:
        pg, tensor, output, peer = self._group, work.input, work.output, 1 - work.rank
        inputs, outputs, mine = work.input_parts, work.output_parts, work.rank == ROOT
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(pg.all_reduce, tensor),
            "broadcast": partial(pg.broadcast, tensor, ROOT),
            "reduce": partial(pg.reduce, tensor, ROOT),
            "all_gather": partial(pg.all_gather, outputs, tensor),
            "all_gather_single": partial(pg.all_gather_single, output, tensor),
            "reduce_scatter": partial(pg.reduce_scatter, output, inputs),
            "reduce_scatter_single": partial(pg.reduce_scatter_single, output, tensor),
            "gather": partial(pg.gather, outputs if mine else [], tensor, ROOT),
            "scatter": partial(pg.scatter, output, inputs if mine else [], ROOT),
            "all_to_all": partial(pg.all_to_all, outputs, inputs),
            "all_to_all_single": partial(pg.all_to_all_single, output, tensor),
            "barrier": pg.barrier,
        }

        def ping() -> None:
            pg.send(tensor, peer)
            pg.recv(tensor, peer)

        def pong() -> None:
            pg.recv(tensor, peer)
            pg.send(tensor, peer)

        return _played(work, calls, ping, pong)

    def close(self) -> None:
        self._group.shutdown()
        self._node.close()


def _played(
    work: Workload,
    collectives: dict[str, Callable[[], object]],
    ping: Callable[[], None],
    pong: Callable[[], None],
) -> Callable[[], object]:
    """Return the call for a workload; of the ping-pong, the part of this rank, if it plays."""
    if work.case.op != SEND_RECV:
        return collectives[work.case.op]
    if work.world_size != 2:
        raise NotImplementedError("a ping-pong takes two ranks")
    return ping if work.rank == ROOT else pong


def rank_main(options: argparse.Namespace, rank: int, store_path: str) -> list[Measurement]:
    """Measure as one of the ranks; all return the same."""
    torch.set_num_threads(1)
    store = store_at(store_path, options.ranks)
    referee = Referee(store, rank, options.ranks)
    contenders = [
        Gloo(store, rank, options.ranks),
        Dist2("dist2", "auto", store, rank, options.ranks),
        Dist2("dist2 tcp", "tcp", store, rank, options.ranks),
    ]
    cases = [Case(op, size) for op in options.ops for size in (options.sizes if op != "barrier" else [0])]
    found: list[Measurement] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=rank != 0) as progress:
        task = progress.add_task("measuring", total=len(cases))
        patience = Patience(options.quiet, options.retries)
        for measurements in measure(contenders, cases, options.rounds, referee, patience):
            found += measurements
            progress.update(task, advance=1, description=measurements[0].case.op)
    for contender in contenders:
        contender.close()
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ops", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OP")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    parser.add_argument("--quiet", type=float, default=0.2, help="cores that others may use meanwhile")
    parser.add_argument("--retries", type=int, default=2, help="of a case while others use more")
    parser.add_argument("--name", default="gloo", help="of the files in benchmarks/results")
    options = parser.parse_args()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")  # for the ranks: loopback only
    with tempfile.TemporaryDirectory(prefix="dist2-bench-") as folder:
        found = in_processes(partial(rank_main, options), options.ranks, f"{folder}/store")[0]
    show(found, options)


def show(found: list[Measurement], options: argparse.Namespace) -> None:
    """Print the table, the cells that dist2 loses, and where the files are."""
    console = Console(width=max(100, Console().width))
    about = report.machine()
    console.print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}")
    foreign = [each.foreign_cores for each in found]
    busy = f"{statistics.median(foreign):.2f} cores busy in the median case, {max(foreign):.2f} in the worst"
    console.print(f"other processes kept {busy}")
    names = list(dict.fromkeys(each.contender for each in found))
    comparisons = report.compare(found, peer=GLOO)
    title = f"{options.ranks} ranks on one host: time a call, and how many times faster than {GLOO}"
    console.print(report.table_of(comparisons, names, title))
    for name in (name for name in names if name != GLOO):
        known = [each for each in comparisons if each.ratio(name) is not None]
        lost = [each.case for each in known if each.is_slower(name)]
        cells = ", ".join(f"{case.op} {report.size_text(case.nbytes)}" for case in lost)
        verdict = f"{name}: ahead of {GLOO} in {len(known) - len(lost)} of {len(comparisons)} cases"
        console.print(f"{verdict}; slower at {cells}" if lost else verdict)
        best = sum((each.best_ratio(name) or 0) >= 1 for each in known)
        console.print(f"{name}: best round against best round, ahead in {best}")
    for each in found:
        if each.failure:
            console.print(f"[red]{each.contender} {each.case.op} {each.case.nbytes}: {each.failure}[/]")
    settings = {"ranks": options.ranks, "rounds": options.rounds, "dtype": "float32"}
    console.print("saved", report.save(options.name, found, settings))
    console.print("tables", report.save_markdown(options.name, comparisons, names))
    console.print("plot ", report.plot(options.name, comparisons, names, title))


if __name__ == "__main__":
    main()
