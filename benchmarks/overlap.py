"""How much of a long asynchronous all_reduce hides behind matrix products, and what the products lose.

    python benchmarks/overlap.py                 # 2 ranks, 64 MiB
    python benchmarks/overlap.py --ranks 1       # the products alone: how noisy is the machine?

Each round times the all_reduce alone, the products alone, both one after the other, and both at once. With
C and P the first two and B the last, the efficiency is (C + P - B) / min(C, P): 1 where the shorter one is
free, 0 where nothing is gained. What can be gained depends on the cores: with as many ranks as cores, the
products already use all of them, and what the all_reduce computes must be taken from them: then 0 says that
nothing is lost either. So B is also shown beside C + P.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import torch
from harness import Referee, in_processes, store_at
from torch.distributed import PrefixStore

import dist2

RESULTS = Path(__file__).parent / "results" / "overlap.json"
OUTSTANDING = 100


@attrs.frozen
class Plan:
    """What to measure."""

    ranks: int
    mib: int
    rounds: int
    shared: bool


@attrs.frozen
class Job:
    """What one rank does.

    Attributes:
        pg: The group.
        tensor: What is reduced.
        left, right, product: Of the matrix products.
        products: How many: about as long as the all_reduce takes.
    """

    pg: dist2.ProcessGroup
    tensor: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    product: torch.Tensor
    products: int

    def reduce(self) -> None:
        self.pg.all_reduce(self.tensor)

    def multiply(self) -> None:
        for _ in range(self.products):
            torch.mm(self.left, self.right, out=self.product)

    def in_turn(self) -> None:
        self.reduce()
        self.multiply()

    def at_once(self) -> None:
        work = self.pg.all_reduce(self.tensor, async_op=True)
        self.multiply()
        work.wait()


def timed(body: Callable[[], None], referee: Referee) -> float:
    """Return the seconds that the slowest rank took."""
    referee.latest(0.0)
    start = time.perf_counter()
    body()
    return referee.latest(time.perf_counter() - start)


def job_for(pg: dist2.ProcessGroup, plan: Plan, referee: Referee) -> Job:
    """Return a job whose products take about as long as its all_reduce, after checking the latter."""
    numel = plan.mib << 18
    tensor = dist2.shared_empty(numel) if plan.shared else torch.empty(numel)
    tensor.fill_(1.0)
    pg.all_reduce(tensor, async_op=True).wait()
    if not tensor.eq(plan.ranks).all():
        raise AssertionError("all_reduce gave a wrong result")
    tensor.zero_()
    matrices = [torch.rand(512, 512) for _ in range(3)]
    once = Job(pg, tensor, *matrices, products=1)
    reduce_s = min(timed(once.reduce, referee) for _ in range(3))
    multiply_s = min(timed(once.multiply, referee) for _ in range(5))
    return attrs.evolve(once, products=max(1, round(reduce_s / multiply_s)))


def outstanding(pg: dist2.ProcessGroup, referee: Referee) -> dict[str, float]:
    """Return the microseconds an operation of many small ones takes: in turn, and all outstanding at once.

    They must come back in order: each multiplies by two and adds what the ranks have added before.
    """
    tensors = [torch.full((2,), float(count)) for count in range(OUTSTANDING)]

    def in_turn() -> None:
        for tensor in tensors:
            pg.all_reduce(tensor, async_op=True).wait()

    def at_once() -> None:
        works = [pg.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        ended = [work.operation.finished_ns for work in works]
        if ended != sorted(ended):
            raise AssertionError("operations ended out of order")

    found = {"in turn": in_turn, "at once": at_once}
    at_once()
    if [tensor[0].item() for tensor in tensors] != [pg.size() * count for count in range(OUTSTANDING)]:
        raise AssertionError("outstanding operations mixed up their tensors")
    for tensor in tensors:
        tensor.zero_()
    return {
        name: statistics.median(timed(body, referee) for _ in range(9)) / OUTSTANDING * 1e6
        for name, body in found.items()
    }


def measure(plan: Plan, rank: int, store_path: str) -> dict[str, object]:
    """Run as one rank."""
    torch.set_num_threads(1)
    store = store_at(store_path, plan.ranks)
    referee = Referee(store, rank, plan.ranks)
    meeting = PrefixStore("dist2", store)
    with dist2.new_group("socket", 60.0, store=meeting, rank=rank, world_size=plan.ranks) as pg:
        job = job_for(pg, plan, referee)
        bodies = {
            "all_reduce": job.reduce,
            "products": job.multiply,
            "in turn": job.in_turn,
            "at once": job.at_once,
        }
        took: dict[str, list[float]] = {name: [] for name in bodies}
        for _ in range(plan.rounds):
            for name, body in bodies.items():
                took[name].append(timed(body, referee))
        return {"products": job.products, "rounds_s": took, "outstanding_us": outstanding(pg, referee)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shared", action="store_true", help="tensors of dist2.shared_empty")
    plan = Plan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        report = in_processes(partial(measure, plan), plan.ranks, f"{folder}/store")[0]
    medians = {name: statistics.median(rounds) for name, rounds in report["rounds_s"].items()}
    reduce_s, multiply_s, both_s = (medians[name] for name in ("all_reduce", "products", "at once"))
    efficiency = (reduce_s + multiply_s - both_s) / min(reduce_s, multiply_s)
    print(f"all_reduce of {plan.mib} MiB and {report['products']} products, {plan.ranks} ranks, median ms")
    for name, median_s in medians.items():
        print(f"{name:<14}{median_s * 1e3:>10.2f}")
    print(f"overlap efficiency {efficiency:.2f}; at once / sum {both_s / (reduce_s + multiply_s):.2f}")
    small = ", ".join(f"{name} {value:.1f} us" for name, value in report["outstanding_us"].items())
    print(f"{OUTSTANDING} asynchronous all_reduces of 8 bytes, each: {small}")
    RESULTS.parent.mkdir(exist_ok=True)
    figures = {"medians_s": medians, "efficiency": efficiency}
    RESULTS.write_text(json.dumps({"plan": attrs.asdict(plan), **figures, **report}, indent=1))
    print(f"rounds: {RESULTS}")


if __name__ == "__main__":
    main()
