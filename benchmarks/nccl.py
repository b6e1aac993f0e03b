"""Cost of collectives on a GPU through dist2, and through torch's own NCCL group.

    python benchmarks/nccl.py                # on a machine with a GPU; `make gpu-bench`

Both run in the same processes, one after the other. Measured with one rank are the time that the caller
spends on launching an all_reduce of 8 bytes, synchronous and asynchronous; the time and bandwidth of longer
ones on the GPU; a matrix product with an all_reduce beside it, against the two alone; and the part of the
launch that flight recorder and counters take. With 2 processes on one GPU only the longer ones are. Without a
GPU it says so, and measures only the launch, over the tests' stub of NCCL and host memory: no figure of a
GPU, but the part of dist2 and cupy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import dist2
from dist2 import ProcessGroup
from dist2.backends.nccl.library import load, version_text
from dist2.errors import BackendUnavailableError
from dist2.operation.instruments import add_instrument
from observability import FlightRecorder, Metrics

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support import nccl_stubs
from support.gpu_ranks import run_on_gpu
from support.ranks import host_platform

CALLS = 1000
ROUNDS = 7
LENGTHS = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
"""Elements of float32."""
SHARED_LENGTHS = LENGTHS[:3]
SHARED_CALLS = 3
"""Where ranks share the GPU: their kernels take turns, and data takes the loopback interface."""

Reduce = Callable[[torch.Tensor, bool], Any]


def launch_us(reduce: Reduce, async_op: bool) -> float:
    """Return the caller's time for a call on 8 bytes."""
    tensor, times = torch.ones(2, device="cuda"), list[float]()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        works = [reduce(tensor, async_op) for _ in range(CALLS)]
        times.append((time.perf_counter() - start) / CALLS * 1e6)
        if async_op:
            works[-1].wait()
        torch.cuda.synchronize()
    return statistics.median(times)


def device_us(work: Callable[[], object], calls: int = 20) -> float:
    """Return the time that the current stream spends on a call."""
    times = list[float]()
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls * 1000)
    return statistics.median(times)


def overlap(reduce: Reduce) -> dict[str, float]:
    """Return the times of a matrix product, of an all_reduce, and of both at once."""
    matrix, tensor = torch.randn(4096, 4096, device="cuda"), torch.ones(1 << 24, device="cuda")

    def both() -> None:
        work = reduce(tensor, True)
        matrix @ matrix
        work.wait()

    return {
        "product_us": device_us(lambda: matrix @ matrix),
        "all_reduce_us": device_us(lambda: reduce(tensor, False)),
        "both_us": device_us(both),
    }


def measure(reduce: Reduce, world_size: int) -> dict[str, Any]:
    """Return all figures of one way to reduce, after checking that it does."""
    ones = torch.ones(1000, device="cuda")
    reduce(ones, False)
    assert ones.sum().item() == 1000.0 * world_size
    is_shared = world_size > 1
    lengths, calls = (SHARED_LENGTHS, SHARED_CALLS) if is_shared else (LENGTHS, 20)
    longer = {}
    for numel in lengths:
        tensor = torch.zeros(numel, device="cuda")
        spent_us = device_us(lambda tensor=tensor: reduce(tensor, False), calls)  # type: ignore[misc]  # bound at once
        longer[4 * numel] = {"us": spent_us, "GB_per_s": 4 * numel / spent_us / 1000}
    if is_shared:
        return {"by_bytes": longer}
    return {
        "launch_us": launch_us(reduce, False),
        "launch_async_us": launch_us(reduce, True),
        "by_bytes": longer,
        "overlap": overlap(reduce),
    }


def side_by_side(pg: ProcessGroup, path: str) -> dict[str, Any]:
    """Run as one rank: measure dist2's group and torch's."""
    import torch.distributed as torch_dist

    torch.cuda.set_device(0)
    size = pg.size()
    ours = measure(lambda tensor, async_op: pg.all_reduce(tensor, async_op=async_op), size)
    store = torch_dist.FileStore(path, size)
    torch_dist.init_process_group(
        "nccl", store=store, rank=pg.rank(), world_size=size, timeout=timedelta(seconds=60)
    )
    theirs = measure(lambda tensor, async_op: torch_dist.all_reduce(tensor, async_op=async_op), size)
    torch_dist.destroy_process_group()
    return {
        "dist2": ours,
        "torch": theirs,
        "gpu": torch.cuda.get_device_name(0),
        "torch_version": torch.__version__,
    }


def recording(pg: ProcessGroup) -> dict[str, float]:
    """Run as one rank, without instruments: return the time to launch without and with them, in turn."""
    torch.cuda.set_device(0)
    variants = {"without_us": (), "with_us": (FlightRecorder(), Metrics())}
    spent: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, instruments in variants.items():
            remove = [add_instrument(each) for each in instruments]
            spent[name].append(
                launch_us(lambda tensor, async_op: pg.all_reduce(tensor, async_op=async_op), False)
            )
            for each in remove:
                each()
    return {name: statistics.median(each) for name, each in spent.items()}


def over_the_stub() -> dict[str, Any] | str:
    """Return the caller's times to launch operations of 8 bytes on host memory, at world size 1."""
    why = nccl_stubs.missing()
    if why is not None:
        return why
    with host_platform(max_delay_us=0, blocks=False) as platform:
        store = dist2.HashStore()
        with dist2.new_group("nccl", 60.0, platform=platform, store=store, rank=0, world_size=1) as pg:
            tensor = torch.ones(2)
            figures = {"through": "cupy" if nccl_stubs.has_cupy() else "ctypes"}
            for name, is_async in (("launch", False), ("launch_async", True)):
                spent_us, cpu_us = _launch_on_host_us(pg, tensor, is_async)
                figures[f"{name}_us"], figures[f"{name}_cpu_us"] = f"{spent_us:.1f}", f"{cpu_us:.1f}"
            return figures


def _launch_on_host_us(pg: ProcessGroup, tensor: torch.Tensor, is_async: bool) -> tuple[float, float]:
    """Return the caller's time for a call, and its time on a processor.

    The stub's streams are threads that take the interpreter from the caller, as those of a GPU do not: the
    second depends less on that, and on other programs.
    """
    times, on_cpu = list[float](), list[float]()
    for _ in range(ROUNDS):
        start, cpu = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            pg.all_reduce(tensor, async_op=is_async)
        on_cpu.append((time.thread_time() - cpu) / CALLS * 1e6)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
        pg.barrier()
    return statistics.median(times), statistics.median(on_cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    given = parser.parse_args()
    try:
        library = load()
    except BackendUnavailableError as error:
        print(f"no GPU was measured: {error}")
        print(json.dumps({"over the stub": over_the_stub()}, indent=2))
        return
    found: dict[str, Any] = {"nccl": version_text(library.version)}
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            measured = run_on_gpu(world_size, side_by_side, path, f"{directory}/torch")[0]
        found[f"{world_size} rank(s)"] = measured
        print(world_size, "rank(s):", json.dumps(measured), flush=True)
    os.environ["DIST2_INSTRUMENTS"] = "0"
    with tempfile.TemporaryDirectory() as directory:
        (found["recorder and counters"],) = run_on_gpu(1, recording, Path(directory))
    text = json.dumps(found, indent=2)
    print(text)
    if given.json is not None:
        given.json.write_text(text)


if __name__ == "__main__":
    main()
