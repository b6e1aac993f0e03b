"""How long do forked ranks take from the fork to the end of their first barrier, beside Gloo?

    python benchmarks/group_creation.py              # 4 ranks, 7 rounds
    python benchmarks/group_creation.py --ranks 8

The parent has imported torch and dist2, as a launcher that forks its workers has. Contenders take turns;
each figure is the median over rounds of the time from the first fork until the slowest rank has passed the
barrier.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import dist2

Rank = Callable[[int, int], Any]
_STAMP = struct.Struct("d")


def forked(size: int, rank_body: Rank) -> float:
    """Run ranks as forked processes; return the seconds until the slowest one was done."""
    reader, writer = os.pipe()
    start = time.monotonic()
    children = [_fork(rank, size, rank_body, writer) for rank in range(size)]
    for child in children:
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("a rank failed: see its traceback")
    stamps = os.read(reader, _STAMP.size * size)
    os.close(reader)
    os.close(writer)
    latest: float = max(stamp for (stamp,) in _STAMP.iter_unpack(stamps))
    return latest - start


def _fork(rank: int, size: int, rank_body: Rank, writer: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        group = rank_body(rank, size)
        os.write(writer, _STAMP.pack(time.monotonic()))
        del group
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child ends here, after any exception
        traceback.print_exc()
        os._exit(1)


def _gloo(url: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    dist.barrier()


def _ours(url: str, rank: int, size: int) -> Any:
    group = dist2.new_group("socket", init_method=url, rank=rank, world_size=size)
    group.barrier()
    return group


def _tcp_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _file_url(folder: str, number: int) -> str:
    return f"file://{Path(folder) / str(number)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    plan = parser.parse_args()
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(plan.rounds):
            for name, body in (("gloo", _gloo), ("dist2", _ours)):
                urls = {"tcp": _tcp_url(), "file": _file_url(folder, 2 * number + (body is _ours))}
                for scheme, url in urls.items():
                    seconds = forked(plan.ranks, partial(body, url))
                    took.setdefault(f"{name} {scheme}://", []).append(seconds)
    for name, seconds_of in took.items():
        low, middle, high = statistics.quantiles(seconds_of, n=4)
        print(f"{name:14} {middle * 1e3:7.1f} ms   (middle half: {low * 1e3:.1f} to {high * 1e3:.1f})")


if __name__ == "__main__":
    main()
