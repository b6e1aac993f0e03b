"""Cost of groups: each way to make one beside torch's new_group, and a thousand of them in one process.

    python benchmarks/groups.py                      # 4 ranks, 1,000 groups
    python benchmarks/groups.py --groups 200

Both sides are measured up to the end of the first collective, because a group that has moved no data may not
have connected yet. Rounds alternate. The report has the median over rounds of the slowest rank, and the
quartiles: if ranks share cores, the times depend on which rank runs first.

Ranks come from a collective of the reference side, one after the other, as in programs; with ``--together``
they sleep until a moment at which all compete for the cores.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from harness import Referee, in_processes, store_at
from torch.distributed import PrefixStore, Store

import dist2
from dist2.cli.bench.stopping import stop_as_by_ctrl_c

RESULTS = Path(__file__).parent / "results" / "groups.json"
SPLIT, SHRINK, NEW, TORCH = "dist2 split", "dist2 shrink", "dist2 new_group", "torch new_group (gloo)"


@attrs.frozen
class Plan:
    """Settings: number of ranks, rounds, groups open at once; the start method of the ranks."""

    ranks: int
    rounds: int
    groups: int
    together: bool


@attrs.frozen
class Holdings:
    """Resources of a process.

    Attributes:
        descriptors: Open files.
        threads: Of Python and of libraries.
        maps: Lines in the process's memory map.
        resident: Bytes of memory.
    """

    descriptors: int
    threads: int
    maps: int
    resident: int

    @classmethod
    def now(cls) -> Holdings:
        """Count them."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        threads = len(list(Path("/proc/self/task").iterdir()))
        return cls(len(list(Path("/proc/self/fd").iterdir())), threads, maps, resident)


def use(group: dist2.ProcessGroup) -> Callable[[], None]:
    """Call the first collective of a group; return a callable that closes it."""
    tensor = torch.ones(2)
    group.all_reduce(tensor)
    if tensor.tolist() != [group.size()] * 2:
        raise AssertionError(f"all_reduce gave {tensor.tolist()}")
    return group.shutdown


def whole(parent: dist2.ProcessGroup, ranks: int) -> dist2.ProcessGroup:
    """Make a group of all ranks of another."""
    group = parent.split(list(range(ranks)))
    assert group is not None  # this rank is one of all
    return group


def split_once(parent: dist2.ProcessGroup, ranks: int) -> Callable[[], None]:
    """Make a group of all ranks of another, and use it."""
    return use(whole(parent, ranks))


def shrink_once(parent: dist2.ProcessGroup) -> Callable[[], None]:
    """Have all ranks agree on the survivors, and use the group of those."""
    return use(parent.shrink())


def new_once(store: Store, rank: int, ranks: int, numbers: Iterator[int]) -> Callable[[], None]:
    """Make a group by way of a store, and use it."""
    own = PrefixStore(f"new/{next(numbers)}", store)
    return use(dist2.new_group("socket", 60.0, store=own, rank=rank, world_size=ranks))


def torch_once(ranks: int) -> Callable[[], None]:
    """Do the same with torch."""
    group = dist.new_group(list(range(ranks)), backend="gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    if tensor.tolist() != [ranks] * 2:
        raise AssertionError(f"all_reduce gave {tensor.tolist()}")
    return partial(dist.destroy_process_group, group)


def compare(plan: Plan, parent: dist2.ProcessGroup, store: Store, referee: Referee) -> dict[str, list[float]]:
    """Return the seconds that one group took, round by round, for each way to make it."""
    makers = {
        SPLIT: partial(split_once, parent, plan.ranks),
        SHRINK: partial(shrink_once, parent),
        NEW: partial(new_once, store, referee.rank, plan.ranks, itertools.count()),
        TORCH: partial(torch_once, plan.ranks),
    }
    took: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(plan.rounds + 1):
        for name, make in makers.items():
            start = referee.start() if plan.together else referee.now()
            close = make()
            took[name].append(referee.latest(time.monotonic() - start))
            close()
            del close  # the group goes now, and not in the next one's round
    return {name: rounds[1:] for name, rounds in took.items()}


def many(plan: Plan, parent: dist2.ProcessGroup, referee: Referee) -> dict[str, Any]:
    """Open many groups, use each, close them; return the process's resources before, meanwhile and after."""
    split_once(parent, plan.ranks)()
    before = Holdings.now()
    referee.latest(0.0)
    start = time.perf_counter()
    groups = [whole(parent, plan.ranks) for _ in range(plan.groups)]
    opened_s = time.perf_counter() - start
    idle = Holdings.now()
    for group in groups:
        group.all_reduce(torch.ones(2))
    used_s = time.perf_counter() - start - opened_s
    used = Holdings.now()
    referee.latest(0.0)
    start = time.perf_counter()
    for group in groups:
        group.shutdown()
    closed_s = time.perf_counter() - start
    groups.clear()
    gc.collect()
    referee.latest(0.0)
    split_once(parent, plan.ranks)()  # frees memory that other ranks were last to release
    after = Holdings.now()
    counts = {"before": before, "idle": idle, "used": used, "after": after}
    seconds = {"open_s": opened_s, "first_collective_s": used_s, "close_s": closed_s}
    each = {name: value / plan.groups for name, value in seconds.items()}
    return {"holdings": {name: attrs.asdict(held) for name, held in counts.items()}, **each}


def measure(plan: Plan, rank: int, store_path: str) -> dict[str, Any]:
    """Run as one rank."""
    torch.set_num_threads(1)
    store: Store = store_at(store_path, plan.ranks)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=plan.ranks,
        timeout=timedelta(seconds=60),
    )
    referee = Referee(store, rank, plan.ranks)
    meeting = PrefixStore("dist2", store)
    with dist2.new_group("socket", 60.0, store=meeting, rank=rank, world_size=plan.ranks) as parent:
        split_once(parent, plan.ranks)()
        report = {"rounds_s": compare(plan, parent, store, referee), "many": many(plan, parent, referee)}
    dist.destroy_process_group()
    return {**report, "threads_left": [each.name for each in threading.enumerate()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--groups", type=int, default=1000, help="open at once")
    parser.add_argument("--together", action="store_true", help="all ranks begin at one moment")
    plan = Plan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        report = in_processes(partial(measure, plan), plan.ranks, f"{folder}/store")[0]
    medians = {name: statistics.median(rounds) for name, rounds in report["rounds_s"].items()}
    print(f"a group and its first collective, {plan.ranks} ranks, median of {plan.rounds}")
    for name, median_s in medians.items():
        low, _, high = (each * 1e3 for each in statistics.quantiles(report["rounds_s"][name]))
        ratio = medians[TORCH] / median_s
        print(f"{name:<24}{median_s * 1e3:>8.2f} ms{ratio:>7.1f}x{low:>10.2f} to {high:.2f} ms")
    found = report["many"]
    print(f"{plan.groups} groups: ", end="")
    print(", ".join(f"{name[:-2]} {found[name] * 1e6:.0f} us" for name in found if name.endswith("_s")))
    print(f"{'held by rank 0':<16}{'descriptors':>12}{'threads':>10}{'maps':>8}{'KiB a group':>14}")
    resident = found["holdings"]["before"]["resident"]
    for name, held in found["holdings"].items():
        each = (held["resident"] - resident) / plan.groups / 1024
        print(f"{name:<16}{held['descriptors']:>12}{held['threads']:>10}{held['maps']:>8}{each:>14.1f}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"plan": attrs.asdict(plan), "medians_s": medians, **report}, indent=1))
    print(f"rounds: {RESULTS}")


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
