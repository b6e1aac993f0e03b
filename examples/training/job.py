"""Start the default process group of torch, on dist2 or on Gloo."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

SEED = 7


@contextmanager
def job() -> Iterator[tuple[int, int]]:
    """Yield rank and number of ranks; ``--on gloo`` or ``--on dist2`` (the default) chooses the backend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", choices=["dist2", "gloo"], default="dist2")
    backend = parser.parse_args().on
    if backend == "dist2":
        import dist2.torch_backend  # noqa: F401 - registers the backend with torch
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group(backend)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def report(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(f"ok {text}", flush=True)


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the same bits on all ranks."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    return all(torch.equal(each, tensor) for each in everyone)
