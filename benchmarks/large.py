"""Time of a large all_reduce inside a host, as a multiple of a local add_ over the same bytes.

    python benchmarks/large.py                              # 2 ranks, 1 MiB to 256 MiB
    python benchmarks/large.py --ranks 4 --mib 64 --rounds 5

All ranks add or reduce at once, one thread each. Contenders take turns, round by round; the time of a round
is that of the slowest rank, and the median counts. An all_reduce on tensors of `dist2.shared_empty` is
compared with add_ on such tensors, the others with add_ on ordinary ones. Results are checked first.

The bound: on n bytes add_ reads 2 n and writes n. An all_reduce of 2 ranks that copies nothing reads n / 2 of
its own and n / 2 of the other's, and writes n / 2 to each: two thirds of that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
from harness import Referee, in_processes, one_round, store_at
from torch.distributed import PrefixStore

import dist2
from dist2.backends.socket.tuning import Thresholds, Tuning
from dist2.cli.bench.report import machine
from dist2.cli.bench.stopping import stop_as_by_ctrl_c

RESULTS = Path(__file__).parent / "results" / "large.json"
ADD, ADD_SHARED = "add_", "add_ on shared tensors"
SLOTS, ORDINARY, SHARED = "through slots", "ordinary tensors", "dist2.shared_empty"
BESIDE = {SLOTS: ADD, ORDINARY: ADD, SHARED: ADD_SHARED}
"""Each all_reduce, and the contender that it is compared with."""
NEVER = 1 << 40


@attrs.frozen
class Plan:
    """Settings.

    Attributes:
        ranks: How many.
        mib: Sizes, in MiB.
        rounds: Of each contender and size.
    """

    ranks: int
    mib: tuple[int, ...]
    rounds: int


@attrs.frozen
class Groups:
    """The two groups of a rank: as it comes, and one that never reads tensors in place."""

    usual: dist2.ProcessGroup
    slots: dist2.ProcessGroup


def reduction(pg: dist2.ProcessGroup, tensor: torch.Tensor) -> Callable[[], object]:
    """Return a callable that reduces a tensor in place, after a check of its result."""
    steps = torch.arange(tensor.numel()) % 251
    tensor.copy_(steps).add_(pg.rank())
    pg.all_reduce(tensor)
    if not torch.equal(tensor, (steps * pg.size() + sum(range(pg.size()))).float()):
        raise AssertionError(f"all_reduce of {tensor.nbytes} bytes gave a wrong result")
    tensor.zero_()  # which sums leave as it is
    return lambda: pg.all_reduce(tensor)


def contenders(groups: Groups, numel: int) -> dict[str, Callable[[], object]]:
    """Return the contenders at one size."""
    ordinary = [torch.zeros(numel) for _ in range(2)]
    shared = [dist2.shared_empty(numel).zero_() for _ in range(2)]
    return {
        ADD: lambda: ordinary[0].add_(ordinary[1]),
        ADD_SHARED: lambda: shared[0].add_(shared[1]),
        SLOTS: reduction(groups.slots, ordinary[0]),
        ORDINARY: reduction(groups.usual, ordinary[0]),
        SHARED: reduction(groups.usual, shared[0]),
    }


def measure(plan: Plan, rank: int, store_path: str) -> dict[int, dict[str, list[float]]]:
    """Run as one rank; return the seconds of every round, by MiB and contender."""
    torch.set_num_threads(1)
    store = store_at(store_path, plan.ranks)
    referee = Referee(store, rank, plan.ranks)
    tuning = f"{store_path}-{rank}.json"
    Tuning(Thresholds().mapped_from(NEVER)).write(tuning)
    make = partial(dist2.new_group, "socket", 60.0, rank=rank, world_size=plan.ranks)
    with (
        make(store=PrefixStore("usual", store)) as usual,
        make(store=PrefixStore("slots", store), tuning=tuning) as slots,
    ):
        found: dict[int, dict[str, list[float]]] = {}
        for mib in plan.mib:
            bodies = contenders(Groups(usual, slots), mib << 18)
            calls = max(1, 64 // mib)
            rounds = found[mib] = {name: [] for name in bodies}
            for _ in range(plan.rounds):
                for name, body in bodies.items():
                    rounds[name].append(one_round(body, calls, referee))
        return found


Medians = Mapping[str, float]


def multiples(medians: Medians) -> dict[str, float]:
    """Return each all_reduce's time by that of the add_ that it is compared with."""
    return {name: medians[name] / medians[add] for name, add in BESIDE.items()}


def table(by_size: Mapping[int, Medians]) -> str:
    """Return the table of the documentation."""
    lines = ["| MiB | add_, ms | " + " | ".join(BESIDE) + " |", "|" + "---:|" * (2 + len(BESIDE))]
    for mib, medians in by_size.items():
        cells = [f"{medians[name] * 1e3:.2f} ms ({times:.2f}x)" for name, times in multiples(medians).items()]
        lines.append(f"| {mib} | {medians[ADD] * 1e3:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: Path, by_size: Mapping[int, Medians], title: str) -> None:
    """Draw multiples against sizes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4))
    axis = figure.subplots()
    for name in BESIDE:
        times = [multiples(medians)[name] for medians in by_size.values()]
        axis.plot(list(by_size), times, marker="o", markersize=3, label=name)
    axis.set(title=title, xlabel="MiB", ylabel="times a local add_")
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON; the plot lies beside it")
    options = parser.parse_args()
    plan = Plan(options.ranks, tuple(options.mib), options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        rounds = in_processes(partial(measure, plan), plan.ranks, f"{folder}/store")[0]
    by_size = {
        mib: {name: statistics.median(each) for name, each in found.items()} for mib, found in rounds.items()
    }
    print(table(by_size))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "ranks": plan.ranks, "rounds_s": rounds, "median_s": by_size}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    draw(options.out.with_suffix(".png"), by_size, f"all_reduce, {plan.ranks} ranks, float32")
    print(f"saved {options.out} and {options.out.with_suffix('.png').name}")


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
