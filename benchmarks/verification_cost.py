"""Cost of ``verify=`` for an all_reduce, by size: groups without it, with it, and with a sample take turns.

    python benchmarks/verification_cost.py --ranks 2

Each figure is that of the fastest round, in microseconds a call.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial

import torch
from harness import Referee, in_processes, in_turn, store_at
from torch.distributed import PrefixStore

import dist2
from dist2.cli.bench.stopping import stop_as_by_ctrl_c

SIZES = {"8 B": 8, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
EVERY = (0, 1, 100)


def measure(ranks: int, rounds: int, rank: int, store_path: str) -> dict[str, list[float]]:
    """Return the microseconds of a call for each of `EVERY`, by size. Runs as one rank."""
    torch.set_num_threads(1)
    store = store_at(store_path, ranks)
    referee = Referee(store, rank, ranks)
    groups = {}
    for every in EVERY:
        meeting = PrefixStore(f"verify/{every}", store)
        groups[str(every)] = dist2.new_group(
            "socket", 60, store=meeting, rank=rank, world_size=ranks, verify=every
        )
    found = {}
    for name, nbytes in SIZES.items():
        x = torch.zeros(nbytes // 4)
        took = in_turn({every: partial(pg.all_reduce, x) for every, pg in groups.items()}, rounds, referee)
        found[name] = [min(each) * 1e6 for each in took.values()]
    for pg in groups.values():
        pg.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = in_processes(partial(measure, args.ranks, args.rounds), args.ranks, f"{folder}/store")[0]
    print(f"{'us a call':<10}" + "".join(f"{f'verify={every}':>14}" for every in EVERY))
    for name, times in found.items():
        print(f"{name:<10}" + "".join(f"{each:>14.1f}" for each in times))


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
