"""Ruler for changes of the data plane: this tree against an earlier commit, case by case.

    python benchmarks/ablation.py                                       # everything: takes an hour
    python benchmarks/ablation.py --base main --ops all_reduce --sizes 8 1MiB --ranks 4 --starts 5

The earlier commit is exported to ``build/ablation/`` and built there. Each version has processes of its
own. In a round both versions run the same calls, one after the other, while the other version sleeps; the
ratio of a round is the time of this tree divided by that of the base. All processes are started anew several
times, because placement in memory and caches differs from start to start. A case is *slower* if the median
ratio over all rounds and the ratio of the least times are both above ``--limit``. Such a case is measured
again with more rounds, and the second figure counts. Results are verified at each start. The exit code is 1
if a result is wrong or a case is slower.

Buffers: *hot*, the same ones in each call; *fresh*, the ranks rewrite their input before each call, as
programs do; *cold*, other memory was read before each call, until the caches held nothing else. Fresh and
cold calls are timed one by one, after a barrier. Neighbour: *idle*, or *busy*, one process that computes.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from harness import store_at

ROOT = Path(__file__).parents[1]
BASE = "fe47565"
SIZES = ("8", "1KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
BUFFERS = ("hot", "fresh", "cold")
NEIGHBOURS = ("idle", "busy")
LIMIT = 1.15
ROUND_S = 0.01
MAX_CALLS = 1000
AGAIN = 3  # times as many rounds for a case that seems slower
Call = Callable[[], object]


# A rank of either version: obeys the driver, one JSON object a line


def rank_main(options: argparse.Namespace) -> None:
    """Join the other ranks, then answer commands until the driver closes the pipe."""
    from dist2.cli.bench.contenders import Dist2, Place
    from dist2.cli.bench.workloads import Case, Workload

    torch.set_num_threads(1)
    place = Place(store_at(options.store, options.world_size), options.rank, options.world_size)
    group = Dist2("ablation", place, options.transport)
    others = torch.zeros(cache_bytes() // 4)
    work = Workload(Case("barrier", 0), options.rank, options.world_size)
    call: Call = group.align
    answer({"tree": str(Path(sys.modules["dist2"].__file__ or "").parents[1])})
    for line in sys.stdin:
        told = json.loads(line)
        if "op" in told:
            case = Case(told["op"], told["nbytes"], options.shared)
            work = Workload(case, options.rank, options.world_size)
            call = group.bind(work)
            for _ in range(2):
                work.fill()
                call()
                work.check()
            work.clear()
            answer({})
        else:
            between: dict[str, Call | None] = {"hot": None, "fresh": work.input.zero_, "cold": others.sum}
            before = between[told["buffers"]]
            answer({"took_s": took_s(told["calls"], call, before, group.align)})
    group.close()


def answer(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def took_s(calls: int, call: Call, before: Call | None, align: Call) -> float:
    """Return the seconds of so many calls; with ``before``, without what comes between them."""
    align()
    start = time.perf_counter()
    if before is None:
        for _ in range(calls):
            call()
        return time.perf_counter() - start
    total = 0.0
    for _ in range(calls):
        before()
        align()
        start = time.perf_counter()
        call()
        total += time.perf_counter() - start
    return total


def cache_bytes() -> int:
    """Return twice the last cache, within limits: reading as much leaves nothing else there."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    largest = max((int(each.read_text().strip().removesuffix("K")) << 10 for each in sizes), default=0)
    return min(max(2 * largest, 16 << 20), 128 << 20)


@attrs.frozen
class Case:
    """What is measured; operation and bytes as in `dist2.cli.bench.workloads`."""

    op: str
    nbytes: int
    ranks: int
    buffers: str
    neighbour: str


class Version:
    """The ranks of one version, in processes, from a tree with its extensions built in place."""

    def __init__(self, tree: Path, ranks: int, options: argparse.Namespace) -> None:
        self.tree = tree
        self._folder = tempfile.TemporaryDirectory(prefix="dist2-ablation-")
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        program = [sys.executable, __file__, "--store", f"{self._folder.name}/store"]
        program += ["--world-size", str(ranks), "--transport", options.transport]
        program += ["--shared"] if options.shared else []
        self._ranks = [
            subprocess.Popen([*program, "--rank", str(rank)], env=environment, stdin=-1, stdout=-1, text=True)
            for rank in range(ranks)
        ]
        for found in self._heard():
            if Path(found["tree"]).resolve() != tree.resolve():
                sys.exit(f"a rank of {tree} imported dist2 from {found['tree']}")

    def tell(self, **command: object) -> list[dict[str, Any]]:
        """Have all ranks do something; return their answers."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(command) + "\n")
            rank.stdin.flush()
        return self._heard()

    def _heard(self) -> list[dict[str, Any]]:
        answers = []
        for rank in self._ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                sys.exit(f"a rank of {self.tree} ended: its error is above")
            answers.append(json.loads(line))
        return answers

    def call_s(self, buffers: str, calls: int) -> float:
        """Return the seconds of one call, on the slowest rank."""
        return float(max(each["took_s"] for each in self.tell(buffers=buffers, calls=calls))) / calls

    def __enter__(self) -> Version:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for rank in self._ranks:
            if kind is not None:
                rank.kill()
            rank.communicate()
        self._folder.cleanup()


@attrs.define
class Figures:
    """Seconds of a call in each round, of both versions."""

    base_s: list[float] = attrs.field(factory=list)
    tree_s: list[float] = attrs.field(factory=list)

    @property
    def ratios(self) -> list[float]:
        return [mine / theirs for mine, theirs in zip(self.tree_s, self.base_s, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def least(self) -> float:
        return min(self.tree_s) / min(self.base_s)

    def slower(self, limit: float) -> bool:
        return min(self.ratio, self.least) > limit

    @property
    def spread(self) -> str:
        """The quartiles of the ratios."""
        low, _, high = statistics.quantiles([*self.ratios, self.ratio], n=4)
        return f"{low:.2f} to {high:.2f}"


@contextmanager
def neighbour(kind: str) -> Iterator[None]:
    """Keep a core busy, or not."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if kind == "busy" else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def measure(
    cases: Sequence[Case], options: argparse.Namespace, trees: Sequence[Path], rounds: int
) -> dict[Case, Figures]:
    """Return the figures of all cases, each over several starts of both versions."""
    found = {case: Figures() for case in cases}
    groups = [(ranks, list(alike)) for ranks, alike in itertools.groupby(cases, lambda case: case.ranks)]
    for start, (ranks, alike) in itertools.product(range(options.starts), groups):
        print(f"start {start + 1} of {options.starts}, {ranks} ranks", file=sys.stderr, flush=True)
        with ExitStack() as stack:
            base, tree = (stack.enter_context(Version(each, ranks, options)) for each in trees)
            for work, of_work in itertools.groupby(
                alike, lambda case: {"op": case.op, "nbytes": case.nbytes}
            ):
                base.tell(**work)
                tree.tell(**work)
                for case in of_work:
                    with neighbour(case.neighbour):
                        take(case, base, tree, rounds, found[case])
    return found


def take(case: Case, base: Version, tree: Version, rounds: int, into: Figures) -> None:
    """Measure one case round by round, as many calls of each version."""
    calls = 1
    while calls < MAX_CALLS:
        start = time.perf_counter()
        for version in (base, tree):
            version.call_s(case.buffers, calls)
        once_s = (time.perf_counter() - start) / 2 / calls
        if once_s * calls > ROUND_S / 2:
            break
        calls = min(4 * calls, math.ceil(ROUND_S / once_s), MAX_CALLS)
    for number in range(rounds):
        versions = [(base, into.base_s), (tree, into.tree_s)]
        for version, times in versions if number % 2 else reversed(versions):
            times.append(version.call_s(case.buffers, calls))


def exported(commit: str) -> Path:
    """Return a tree of the commit, with its extensions built in place; it is kept for the next run."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.check_output([*git, "rev-parse", "--short=12", commit], text=True).strip()
    tree = ROOT / "build" / "ablation" / name
    if not (tree / "built").exists():
        archived = subprocess.check_output([*git, "archive", name])
        with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
            archive.extractall(tree, filter="data")
        ours = (
            ["setup.py"] if (tree / "setup.py").exists() else ["-c", "import setuptools; setuptools.setup()"]
        )
        setup = [sys.executable, "-W", "ignore", *ours, "--quiet"]
        subprocess.run([*setup, "egg_info", "build_ext", "--inplace"], cwd=tree, check=True)
        (tree / "built").touch()
    return tree


def report(found: dict[Case, Figures], options: argparse.Namespace) -> bool:
    """Print the table and a summary; return whether no case is slower."""
    from dist2.cli.bench.report import machine
    from dist2.cli.bench.sizes import size_text

    described = machine()
    print(f"\nThis tree against {options.base}: {described['cpu']}, {described['cores']} cores,", end=" ")
    print(f"Python {described['python']}, torch {described['torch']}, load {os.getloadavg()[1]:.1f}\n")
    print(
        "| operation | bytes | ranks | buffers | neighbour | base us | tree us | ratio | quartiles | least |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case, each in found.items():
        base_us, tree_us = (f"{statistics.median(times) * 1e6:.1f}" for times in (each.base_s, each.tree_s))
        mark = "**" if each.slower(options.limit) else ""
        cells = [case.op, size_text(case.nbytes), case.ranks, case.buffers, case.neighbour, base_us, tree_us]
        cells += [f"{mark}{each.ratio:.2f}{mark}", each.spread, f"{each.least:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |")
    mean = math.exp(statistics.fmean(math.log(each.ratio) for each in found.values()))
    least = math.exp(statistics.fmean(math.log(each.least) for each in found.values()))
    slower = sum(each.slower(options.limit) for each in found.values())
    print(f"\n{len(found)} cases, mean ratio {mean:.3f}, of the least times {least:.3f}; {slower} slower")
    return not slower


def wanted_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases that the options select; a barrier has one size, and its buffers are always hot."""
    from dist2.cli.bench.sizes import parse_size
    from dist2.cli.bench.workloads import BARRIER

    cases = [
        Case(op, parse_size(size) if op != BARRIER else 0, ranks, buffers, kind)
        for ranks in options.ranks
        for op in options.ops
        for size in options.sizes
        for kind in options.neighbours
        for buffers in options.buffers
        if op != BARRIER or buffers != "fresh"
    ]
    return list(dict.fromkeys(cases))


def main() -> None:
    from dist2.cli.bench.workloads import LIST_OPERATIONS, OPERATIONS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", default=BASE, help="the commit to compare with")
    parser.add_argument("--ops", nargs="+", default=OPERATIONS, choices=OPERATIONS + LIST_OPERATIONS)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--buffers", nargs="+", default=BUFFERS, choices=BUFFERS)
    parser.add_argument("--neighbours", nargs="+", default=NEIGHBOURS, choices=NEIGHBOURS)
    parser.add_argument("--starts", type=int, default=3, help="of the processes")
    parser.add_argument("--rounds", type=int, default=5, help="of each case and start")
    parser.add_argument("--limit", type=float, default=LIMIT, help="for the median ratio of a case")
    parser.add_argument("--shared", action="store_true", help="tensors of dist2.shared_empty")
    parser.add_argument("--transport", default="auto", choices=("auto", "shm", "tcp"))
    for name, kind in (("--rank", int), ("--world-size", int), ("--store", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    trees = [exported(options.base), ROOT]
    cases = wanted_cases(options)
    found = measure(cases, options, trees, options.rounds)
    doubtful = [case for case, figures in found.items() if figures.slower(options.limit)]
    if doubtful:
        print(f"{len(doubtful)} cases are measured again", file=sys.stderr)
        found |= measure(doubtful, options, trees, AGAIN * options.rounds)
    sys.exit(0 if report(found, options) else 1)


if __name__ == "__main__":
    main()
