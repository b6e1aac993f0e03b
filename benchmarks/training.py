"""Time of a training step on dist2 and on Gloo: DDP of 25 million parameters, and FSDP2 of the same model.

``python benchmarks/training.py --ranks 2 4 --rounds 8``. Both libraries have a group of the same ranks, and
steps are measured in turn, so that both meet the same disturbances. Before, both must have the same
parameters after a step. ``alone`` is the step without communication (DDP's ``no_sync``); the rest of a step
is communication that does not overlap with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Referee, in_processes, in_turn, store_at
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROWS = 1024, 24, 4
"""24 layers of 1024 x 1024: 25.2 million parameters, 100 MB of float32."""

Step = Callable[[], object]


def model() -> nn.Sequential:
    """Return the model; the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def trained(module: nn.Module, rows: torch.Tensor) -> Step:
    """Return a function that does a step of SGD."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01, foreach=True)

    def step() -> None:
        module(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone(module: DistributedDataParallel, rows: torch.Tensor) -> Step:
    """Return a function that does a step of SGD without communication."""
    step = trained(module, rows)

    def without() -> None:
        with module.no_sync():
            step()

    return without


def ddp(group: dist.ProcessGroup, rows: torch.Tensor) -> tuple[DistributedDataParallel, Step]:
    """Return DDP on a group, and its step."""
    module = DistributedDataParallel(model(), process_group=group, gradient_as_bucket_view=True)
    return module, trained(module, rows)


def fsdp(group: dist.ProcessGroup, rows: torch.Tensor) -> tuple[nn.Module, Step]:
    """Return FSDP2 on a group, and its step."""
    mesh = DeviceMesh.from_group(group, "cpu")
    module = model()
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, trained(module, rows)


def rank_main(rank: int, store_path: str, world_size: int, rounds: int) -> dict[str, list[float]]:
    """Measure all steps on one rank; return seconds by name."""
    import dist2.torch_backend  # noqa: F401 - registers the backend with torch

    torch.set_num_threads(1)
    store = store_at(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    rows = torch.randn(ROWS, WIDTH)
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "dist2")}
    calls: dict[str, Step] = {}
    for kind, make in (("DDP", ddp), ("FSDP2", fsdp)):
        made = {name: make(group, rows) for name, group in groups.items()}
        for _, step in made.values():
            step()
        check([module for module, _ in made.values()])
        calls |= {f"{kind} {name}": step for name, (_, step) in made.items()}
        if kind == "DDP":
            calls["DDP alone"] = alone(ddp(groups["gloo"], rows)[0], rows)
    taken = in_turn(calls, rounds, Referee(store, rank, world_size))
    dist.destroy_process_group()
    return taken


def check(modules: list[nn.Module]) -> None:
    """Check that models have the same parameters, within rounding."""
    first, second = (list(module.parameters()) for module in modules)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other))


def half_range(times: list[float]) -> float:
    """Return half the interquartile range, in percent of the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return 50 * (high - low) / middle


def main() -> None:
    """Print the medians in milliseconds, and how much faster dist2 is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    for world_size in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            body = partial(rank_main, world_size=world_size, rounds=given.rounds)
            taken = in_processes(body, world_size, f"{folder}/store")[0]
        medians = {name: 1000 * statistics.median(each) for name, each in taken.items()}
        found[world_size] = {name: [1000 * each for each in times] for name, times in taken.items()}
        for kind in ("DDP", "FSDP2"):
            gloo, ours = medians[f"{kind} gloo"], medians[f"{kind} dist2"]
            spread = " ".join(f"{half_range(taken[f'{kind} {name}']):.0f} %" for name in ("gloo", "dist2"))
            print(
                f"{world_size} ranks, {kind:5}: Gloo {gloo:7.1f} ms, dist2 {ours:7.1f} ms, "
                f"{gloo / ours:.2f} times (spread {spread}; alone {medians['DDP alone']:.1f} ms)",
                flush=True,
            )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
