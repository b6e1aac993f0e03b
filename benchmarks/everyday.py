"""Speed of everyday calls besides single collectives. Each case beside torch.distributed with Gloo.

    python benchmarks/everyday.py --ranks 2 4            # everything
    python benchmarks/everyday.py --cases ring objects   # the cases with one of these words in their name

A case is written once, for the functions that `torch.distributed` and `dist2.legacy` have in common, and run
with both in the same processes, in turn. The result is checked with both before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed
from harness import TIMEOUT, Referee, in_processes, in_turn, store_at
from rich.console import Console
from rich.table import Table
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel

import dist2.legacy
from dist2.cli.bench.report import machine
from dist2.cli.bench.sizes import ratio_text, size_text, time_text
from dist2.cli.bench.stopping import stop_as_by_ctrl_c

GLOO, DIST2 = "Gloo", "dist2"
RESULTS = Path(__file__).parent / "results"

Call = Callable[[], object]
Check = Callable[[], bool]


@attrs.frozen
class Side:
    """One of the two packages, in one rank.

    Attributes:
        dist: The package.
        rank: The caller's.
        world_size: How many ranks there are.
    """

    dist: Any
    rank: int
    world_size: int

    @property
    def right(self) -> int:
        """The next rank, in a ring."""
        return (self.rank + 1) % self.world_size

    @property
    def left(self) -> int:
        """The one before."""
        return (self.rank - 1) % self.world_size

    def mine(self, nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of so many bytes that holds the caller's rank."""
        return torch.full((max(1, nbytes // dtype.itemsize),), self.rank).to(dtype)


Case = Callable[[Side, int], tuple[Call, Check]]
"""Binds a case to tensors of a size; returns the call to time, and the check of its result."""


def ring_of_isend(side: Side, nbytes: int) -> tuple[Call, Check]:
    """To the next rank by `isend`, from the one before by `irecv`, both awaited."""
    out, into = side.mine(nbytes), side.mine(nbytes)

    def call() -> None:
        works = [side.dist.irecv(into, side.left), side.dist.isend(out, side.right)]
        for work in works:
            work.wait()

    return call, lambda: bool((into == side.left).all())


def ring_of_batches(side: Side, nbytes: int) -> tuple[Call, Check]:
    """The same by `batch_isend_irecv`."""
    out, into = side.mine(nbytes), side.mine(nbytes)
    ops = [
        side.dist.P2POp(side.dist.isend, out, side.right),
        side.dist.P2POp(side.dist.irecv, into, side.left),
    ]

    def call() -> None:
        for work in side.dist.batch_isend_irecv(ops):
            work.wait()

    return call, lambda: bool((into == side.left).all())


def halo_of_batches(side: Side, nbytes: int) -> tuple[Call, Check]:
    """Both neighbours at once, as in an exchange of halos: four messages by `batch_isend_irecv`."""
    out = [side.mine(nbytes), side.mine(nbytes)]
    into = [side.mine(nbytes), side.mine(nbytes)]
    op = side.dist.P2POp
    ops = [
        op(side.dist.isend, out[0], side.right, tag=0),
        op(side.dist.isend, out[1], side.left, tag=1),
        op(side.dist.irecv, into[0], side.left, tag=0),
        op(side.dist.irecv, into[1], side.right, tag=1),
    ]

    def call() -> None:
        for work in side.dist.batch_isend_irecv(ops):
            work.wait()

    return call, lambda: bool((into[0] == side.left).all() and (into[1] == side.right).all())


def from_anyone(side: Side, nbytes: int) -> tuple[Call, Check]:
    """Rank 0 receives one message from each rank, in any order, and answers each."""
    tensor, seen = side.mine(nbytes), set[int]()

    def root() -> None:
        seen.clear()
        for _ in range(side.world_size - 1):
            source = side.dist.recv(tensor)
            seen.add(source)
            side.dist.send(tensor, source)

    def other() -> None:
        side.dist.send(tensor, 0)
        side.dist.recv(tensor, 0)

    return (other if side.rank else root), lambda: bool(side.rank) or len(seen) == side.world_size - 1


def async_all_reduce(side: Side, nbytes: int) -> tuple[Call, Check]:
    """An `all_reduce` with ``async_op=True``, awaited at once."""
    tensor = torch.ones(max(1, nbytes // 4))

    def call() -> None:
        tensor.fill_(1.0)
        side.dist.all_reduce(tensor, async_op=True).wait()

    return call, lambda: bool((tensor == side.world_size).all())


def many_all_reduces(side: Side, nbytes: int) -> tuple[Call, Check]:
    """A hundred tensors, one after the other: gradients without buckets."""
    tensors = [torch.ones(max(1, nbytes // 4)) for _ in range(100)]

    def call() -> None:
        for tensor in tensors:
            tensor.fill_(1.0)
            side.dist.all_reduce(tensor)

    return call, lambda: all(bool((tensor == side.world_size).all()) for tensor in tensors)


def new_all_reduce(side: Side, nbytes: int) -> tuple[Call, Check]:
    """An `all_reduce` of a tensor made for it, while the last nineteen are still there."""
    latest = deque([torch.ones(1)], maxlen=20)

    def call() -> None:
        latest.append(torch.ones(max(1, nbytes // 4)))
        side.dist.all_reduce(latest[-1])

    return call, lambda: bool((latest[-1] == side.world_size).all())


def many_async_all_reduces(side: Side, nbytes: int) -> tuple[Call, Check]:
    """A hundred of them outstanding."""
    tensors = [torch.ones(max(1, nbytes // 4)) for _ in range(100)]

    def call() -> None:
        for tensor in tensors:
            tensor.fill_(1.0)
        for work in [side.dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return call, lambda: all(bool((tensor == side.world_size).all()) for tensor in tensors)


def all_gather_of_a_list(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`all_gather` into a list of tensors."""
    mine = side.mine(nbytes)
    parts = [torch.empty_like(mine) for _ in range(side.world_size)]
    return (
        lambda: side.dist.all_gather(parts, mine),
        lambda: all(bool((part == rank).all()) for rank, part in enumerate(parts)),
    )


def all_gather_into_tensor(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`all_gather_into_tensor`."""
    mine = side.mine(nbytes)
    whole = torch.empty(side.world_size * mine.numel())
    return (
        lambda: side.dist.all_gather_into_tensor(whole, mine),
        lambda: bool((whole == torch.arange(side.world_size).repeat_interleave(mine.numel())).all()),
    )


def gather_of_a_list(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`gather` into a list of the root's."""
    mine = side.mine(nbytes)
    parts = None if side.rank else [torch.empty_like(mine) for _ in range(side.world_size)]
    return (
        lambda: side.dist.gather(mine, parts, dst=0),
        lambda: parts is None or all(bool((part == rank).all()) for rank, part in enumerate(parts)),
    )


def scatter_of_a_list(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`scatter` of a list of the root's."""
    into = side.mine(nbytes)
    parts = None if side.rank else [torch.full_like(into, rank + 1) for rank in range(side.world_size)]
    return lambda: side.dist.scatter(into, parts, src=0), lambda: bool((into == side.rank + 1).all())


def reduce_scatter_of_a_list(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`reduce_scatter` of a list of tensors."""
    into = side.mine(nbytes)
    parts = [torch.full_like(into, rank + 1) for rank in range(side.world_size)]
    return (
        lambda: side.dist.reduce_scatter(into, parts),
        lambda: bool((into == side.world_size * (side.rank + 1)).all()),
    )


def all_gather_object(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`all_gather_object` of a dictionary with a text of so many bytes."""
    gathered: list[Any] = [None] * side.world_size
    mine = {"rank": side.rank, "loss": 0.5, "text": "x" * nbytes}
    return (
        lambda: side.dist.all_gather_object(gathered, mine),
        lambda: [each["rank"] for each in gathered] == list(range(side.world_size)),
    )


def broadcast_object_list(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`broadcast_object_list` of three objects, one a text of so many bytes."""
    objects: list[Any] = [None, None, None] if side.rank else [1, {"a": [1.5, 2]}, "x" * nbytes]
    return lambda: side.dist.broadcast_object_list(objects, src=0), lambda: objects[0] == 1


def barrier(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`barrier`."""
    return lambda: side.dist.barrier(), lambda: True


def reduction(dtype: torch.dtype, op: str, side: Side, nbytes: int) -> tuple[Call, Check]:
    """An `all_reduce` of another dtype or reduction."""
    kind = getattr(side.dist.ReduceOp, op)
    tensor = torch.ones(max(1, nbytes // dtype.itemsize), dtype=dtype)
    expected = side.world_size if op == "SUM" and dtype is not torch.bool else 1

    def call() -> None:
        tensor.fill_(1)
        side.dist.all_reduce(tensor, kind)

    return call, lambda: bool((tensor == expected).all())


def average(side: Side, nbytes: int) -> tuple[Call, Check]:
    """The mean of all ranks: AVG, which Gloo has not; there a sum that is divided."""
    tensor = torch.ones(max(1, nbytes // 4))

    def dist2s() -> None:
        side.dist.all_reduce(tensor, side.dist.ReduceOp.AVG)

    def torchs() -> None:
        side.dist.all_reduce(tensor)
        tensor.div_(side.world_size)

    return (torchs if side.dist is torch.distributed else dist2s), lambda: bool((tensor == 1).all())


def not_contiguous(side: Side, nbytes: int) -> tuple[Call, Check]:
    """An `all_reduce` of every other column of a matrix; Gloo takes none, there it is a copy and back."""
    whole = torch.ones(max(2, nbytes // 4 // 8), 16)
    tensor = whole[:, ::2]

    def dist2s() -> None:
        tensor.fill_(1.0)
        side.dist.all_reduce(tensor)

    def torchs() -> None:
        tensor.fill_(1.0)
        copy = tensor.contiguous()
        side.dist.all_reduce(copy)
        tensor.copy_(copy)

    return (
        torchs if side.dist is torch.distributed else dist2s,
        lambda: bool((tensor == side.world_size).all()) and bool((whole[:, 1::2] == 1).all()),
    )


def coalesced(side: Side, nbytes: int) -> tuple[Call, Check]:
    """`all_reduce_coalesced` of twenty tensors."""
    tensors = [torch.ones(max(1, nbytes // 4)) for _ in range(20)]

    def call() -> None:
        for tensor in tensors:
            tensor.fill_(1.0)
        side.dist.all_reduce_coalesced(tensors)

    return call, lambda: all(bool((tensor == side.world_size).all()) for tensor in tensors)


def training_step(side: Side, nbytes: int) -> tuple[Call, Check]:
    """A step of DistributedDataParallel with layers of ``nbytes`` each."""
    width = max(8, int((nbytes / 4) ** 0.5))
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    group = side.dist.group.WORLD
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    batch = torch.ones(4, width)

    def call() -> None:
        model.zero_grad()
        model(batch).sum().backward()

    def check() -> bool:
        flat = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        low, high = flat.clone(), flat.clone()
        side.dist.all_reduce(low, side.dist.ReduceOp.MIN)
        side.dist.all_reduce(high, side.dist.ReduceOp.MAX)
        return bool((low == high).all())

    return call, check


SMALL, MIDDLE, LARGE = 8, 64 << 10, 4 << 20
CASES: dict[str, tuple[Case, tuple[int, ...]]] = {
    "ring of isend and irecv": (ring_of_isend, (SMALL, MIDDLE, LARGE)),
    "ring of batch_isend_irecv": (ring_of_batches, (SMALL, MIDDLE, LARGE)),
    "halo of batch_isend_irecv": (halo_of_batches, (SMALL, MIDDLE, LARGE)),
    "recv from anyone": (from_anyone, (SMALL, MIDDLE)),
    "all_reduce, async": (async_all_reduce, (SMALL, MIDDLE, LARGE)),
    "100 all_reduces, one by one": (many_all_reduces, (SMALL, MIDDLE)),
    "all_reduce, new tensors": (new_all_reduce, (SMALL, MIDDLE, LARGE)),
    "100 all_reduces, async": (many_async_all_reduces, (SMALL, MIDDLE)),
    "all_reduce_coalesced, 20": (coalesced, (SMALL, MIDDLE)),
    "all_gather, list": (all_gather_of_a_list, (SMALL, MIDDLE, LARGE)),
    "all_gather_into_tensor": (all_gather_into_tensor, (SMALL, MIDDLE, LARGE)),
    "gather, list": (gather_of_a_list, (SMALL, MIDDLE, LARGE)),
    "scatter, list": (scatter_of_a_list, (SMALL, MIDDLE, LARGE)),
    "reduce_scatter, list": (reduce_scatter_of_a_list, (SMALL, MIDDLE, LARGE)),
    "all_gather_object": (all_gather_object, (SMALL, MIDDLE)),
    "broadcast_object_list": (broadcast_object_list, (SMALL, MIDDLE)),
    "barrier": (barrier, (0,)),
    "all_reduce, bfloat16": (partial(reduction, torch.bfloat16, "SUM"), (SMALL, MIDDLE, LARGE)),
    "all_reduce, float16": (partial(reduction, torch.float16, "SUM"), (SMALL, MIDDLE, LARGE)),
    "all_reduce, float64": (partial(reduction, torch.float64, "SUM"), (SMALL, MIDDLE, LARGE)),
    "all_reduce, int8": (partial(reduction, torch.int8, "SUM"), (SMALL, MIDDLE, LARGE)),
    "all_reduce, int64, MAX": (partial(reduction, torch.int64, "MAX"), (SMALL, MIDDLE, LARGE)),
    "all_reduce, AVG": (average, (SMALL, MIDDLE, LARGE)),
    "all_reduce, not contiguous": (not_contiguous, (SMALL, MIDDLE, LARGE)),
    "step of DDP": (training_step, (MIDDLE, LARGE)),
}


@attrs.frozen
class Figure:
    """Measurements of a case.

    Attributes:
        case: Its name.
        ranks: How many.
        nbytes: Of a tensor.
        rounds_s: For each contender, seconds a call and round.
    """

    case: str
    ranks: int
    nbytes: int
    rounds_s: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        return statistics.median(self.rounds_s[name])

    @property
    def ratio(self) -> float:
        """How many times as fast as Gloo."""
        return self.median_s(GLOO) / self.median_s(DIST2)


def measure(case: str, nbytes: int, sides: dict[str, Side], rounds: int, referee: Referee) -> Figure:
    """Measure both in turn."""
    calls: dict[str, Call] = {}
    for name, side in sides.items():
        calls[name], check = CASES[case][0](side, nbytes)
        calls[name]()
        assert check(), f"{case} by {name}: wrong result"
    return Figure(case, referee.world_size, nbytes, in_turn(calls, rounds, referee))


def rank_main(options: argparse.Namespace, ranks: int, rank: int, store_path: str) -> list[Figure]:
    """Measure as one of the ranks; all return the same."""
    warnings.simplefilter("ignore", FutureWarning)  # older spellings are cases, too
    torch.set_num_threads(1)
    store = store_at(store_path, ranks)
    referee = Referee(store, rank, ranks)
    sides = {}
    of_both: list[tuple[str, Any, dict[str, Any]]] = [
        (GLOO, torch.distributed, {"backend": "gloo"}),
        # torch has one default group: that of the other side
        (DIST2, dist2.legacy, {"backend": "socket", "register_with_torch": False}),
    ]
    for name, dist, options_of in of_both:
        place = PrefixStore(name, store)
        dist.init_process_group(store=place, rank=rank, world_size=ranks, timeout=TIMEOUT, **options_of)
        sides[name] = Side(dist, rank, ranks)
    chosen = [name for name in CASES if any(word in name for word in options.cases)]
    figures = [
        measure(case, nbytes, sides, options.rounds, referee) for case in chosen for nbytes in CASES[case][1]
    ]
    for side in sides.values():
        side.dist.destroy_process_group()
    return figures


def show(figures: list[Figure], console: Console) -> None:
    """Print a table."""
    table = Table("case", "ranks", "bytes", GLOO, DIST2, "Gloo / dist2", title="medians")
    for each in figures:
        times = [time_text(each.median_s(name)) for name in (GLOO, DIST2)]
        size = size_text(each.nbytes) if each.nbytes else ""
        table.add_row(each.case, str(each.ranks), size, *times, ratio_text(each.ratio))
    console.print(table)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=(2,), metavar="N")
    parser.add_argument("--cases", nargs="+", default=("",), metavar="WORD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="everyday", help="of the file in benchmarks/results")
    options = parser.parse_args()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")  # for the ranks: loopback only
    figures: list[Figure] = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="dist2-bench-") as folder:
            figures += in_processes(partial(rank_main, options, ranks), ranks, f"{folder}/store")[0]
    console = Console(width=max(100, Console().width))
    show(figures, console)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{options.name}.json"
    path.write_text(json.dumps({"machine": machine(), "figures": list(map(attrs.asdict, figures))}, indent=1))
    console.print(f"saved {path}")


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
