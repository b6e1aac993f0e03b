"""One rank of the demo, started by torchrun: trains its share, averages gradients, checks the weights."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import attrs
import report
import torch
from digits import Images, batches, classifier, steps_an_epoch, train_and_test
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import dist2
import observability
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation

GOAL = 0.95
LEARNING_RATE = 0.1
TIMEOUT_S = 60.0

console = Console()


class Gradients:
    """All gradients of a model in one tensor, so that averaging them is one operation and copies nothing.

    Attributes:
        flat: float32 ``[parameters]``; every parameter's ``grad`` is a view of its part.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def average(self) -> None:
        """Replace them by their mean over the ranks of the current group."""
        current_group().all_reduce(self.flat, dist2.ReduceOp.AVG)


@attrs.frozen
class Result:
    """Outcome of the training; equal on all ranks, except for the times.

    Attributes:
        accuracy: Share of the test images that are classified correctly.
        digests: SHA-256 of each rank's weights.
        steps: Optimizer steps taken.
        elapsed_s: Time they took.
        waiting_s: For each epoch, the time that this rank spent in `all_reduce`.
    """

    accuracy: float
    digests: tuple[str, ...]
    steps: int
    elapsed_s: float
    waiting_s: tuple[float, ...] = ()

    @property
    def complaints(self) -> list[str]:
        """The faults of this result; empty for a success."""
        found = []
        if self.accuracy < GOAL:
            found.append(f"test accuracy {self.accuracy:.1%} is below {GOAL:.0%}: try more epochs")
        odd = [rank for rank, digest in enumerate(self.digests) if digest != self.digests[0]]
        if odd:
            found.append(f"weights of rank(s) {', '.join(map(str, odd))} differ from those of rank 0")
        return found


def current_group() -> dist2.ProcessGroup:
    """Return the group of the ``with`` block that this runs in."""
    pg = dist2.current_process_group()
    assert pg is not None  # `main` enters the block before it trains
    return pg


def train(epochs: int) -> Result:
    """Train on the current group."""
    pg = current_group()
    images, test = train_and_test()
    model = classifier()
    for parameter in model.parameters():
        pg.broadcast(parameter.data, root=0)
    gradients = Gradients(model)
    steps = epochs * steps_an_epoch(images, pg.size())
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    pg.barrier()  # ranks start at different times; from here on the time is that of the training alone
    start = time.perf_counter()
    waiting_s: list[float] = []

    def add(operation: Operation) -> None:
        if operation.signature.kind is OpKind.ALL_REDUCE:
            waiting_s[-1] += (operation.finished_ns - operation.started_ns) / 1e9

    remove = pg.register_completion_hook(add)
    with progress_bar(shown=pg.rank() == 0) as progress:
        task = progress.add_task("training", total=steps, accuracy="")
        for epoch in range(epochs):
            waiting_s.append(0.0)
            for batch in batches(images, epoch, pg.rank(), pg.size()):
                gradients.flat.zero_()
                nn.functional.cross_entropy(model(batch.pixels), batch.labels).backward()
                gradients.average()
                optimizer.step()
                schedule.step()
                progress.advance(task)
            accuracy = accuracy_of(model, test)
            progress.update(task, accuracy=f"{accuracy:.1%}")
    elapsed_s = time.perf_counter() - start
    remove()
    return Result(accuracy, digests_of(model), steps, elapsed_s, tuple(waiting_s))


def progress_bar(*, shown: bool) -> Progress:
    """Return a progress bar, which only rank 0 shows."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, test accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not shown)


@torch.no_grad()
def accuracy_of(model: nn.Module, test: Images) -> float:
    """Return the share of correct answers; each rank tests a part of the images."""
    pg = current_group()
    mine = test[slice(pg.rank(), None, pg.size())]
    right = (model(mine.pixels).argmax(dim=1) == mine.labels).sum()
    pg.all_reduce(right)
    return float(right.item()) / len(test)


def digests_of(model: nn.Module) -> tuple[str, ...]:
    """Return the SHA-256 of every rank's weights, bit for bit."""
    pg = current_group()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    mine = torch.frombuffer(bytearray(hashlib.sha256(weights.numpy().tobytes()).digest()), dtype=torch.uint8)
    everyone = torch.empty(pg.size(), mine.numel(), dtype=torch.uint8)
    pg.all_gather_single(everyone, mine)
    return tuple(bytes(row.tolist()).hex() for row in everyone)


def waiting_times(result: Result) -> list[list[float]]:
    """Return for each rank its ``waiting_s``."""
    mine = torch.tensor(result.waiting_s, dtype=torch.float64)
    everyone = torch.empty(current_group().size(), mine.numel(), dtype=torch.float64)
    current_group().all_gather_single(everyone, mine)
    return [list(row) for row in everyone.tolist()]


def new_group(meeting: str) -> dist2.ProcessGroup:
    """Return the group of all ranks that torchrun started, which meet at a URL."""
    return dist2.new_group(
        "socket",
        TIMEOUT_S,
        init_method=f"{meeting}?rank={os.environ['RANK']}&world_size={os.environ['WORLD_SIZE']}",
        name="digits",
        desc="data-parallel training",
    )


def exchange(pg: dist2.ProcessGroup, text: str) -> list[str]:
    """Return the texts of all ranks, by rank."""
    store = pg.get_group_store()
    store.set(f"demo/{pg.rank()}", text)
    return [store.get(f"demo/{rank}").decode() for rank in range(pg.size())]


def main() -> None:
    """Train, print the figures of every rank's control plane, and write the outcome to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--hold", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meeting", required=True, help="URL where ranks meet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        new_group(options.meeting) as pg,
        observability.start(pg, announce=False) as server,
        dist2.process_group(pg),
    ):
        planes = [report.ControlPlane(*each.split()) for each in exchange(pg, f"{server.url} {server.token}")]
        if pg.rank() == 0:
            report.introduce(console, planes[0])
        result = train(options.epochs)
        observability.dump_flight_recorder(options.out / "flight" / f"rank_{pg.rank()}")
        observability.write_trace(options.out / f"trace_{pg.rank()}.json")
        times = waiting_times(result)  # all ranks have written their dumps when this returns
        if pg.rank() == 0:
            report.conclude(console, planes, result, times, options.out)
            outcome = {**attrs.asdict(result), "complaints": result.complaints}
            (options.out / "result.json").write_text(json.dumps(outcome))
        if options.hold and pg.rank() == 0:
            console.print(f"The control planes stay up for {options.hold:.0f} s; any key ends them.")
            time.sleep(options.hold)
        # Control planes stay up until rank 0 is done. In a barrier the others would report rank 0 as late.
        store = pg.get_group_store()
        if pg.rank() == 0:
            store.set("demo/done", "")
        store.wait(["demo/done"], TIMEOUT_S + options.hold)


if __name__ == "__main__":
    main()
