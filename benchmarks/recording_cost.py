"""Cost of the flight recorder, the counters and the mismatch checks of an 8-byte all_reduce.

    python benchmarks/recording_cost.py                              # two ranks, shared memory
    python benchmarks/recording_cost.py --transport tcp              # two ranks, sockets
    python benchmarks/recording_cost.py --backend fake --ranks 1     # without the noise of other ranks

The ranks take the same turns: a round of calls with none of them, with each alone, with all. Calls
without some check are those of another group without it (``unchecked.py``). The report has
the median over rounds, and the median of the differences inside a round. The last column times
the instruments alone, outside any operation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from harness import Referee, in_processes, one_round, store_at
from torch.distributed import PrefixStore
from unchecked import without_line, without_register

import dist2
from dist2.cli.bench.stopping import stop_as_by_ctrl_c
from dist2.operation.instruments import Dispatch, Instrument, add_instrument
from dist2.operation.kinds import SUM, OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature, TensorMeta
from observability import FlightRecorder, Metrics

OFF, RECORDER, COUNTERS, ALL = "nothing", "flight recorder", "counters", "all"
LINE, REGISTER = "line in user code", "register of calls"
RESULTS = Path(__file__).parent / "results" / "recording_cost.json"


@attrs.frozen
class Plan:
    """Settings: number of ranks, backend, duration."""

    backend: str
    transport: str
    ranks: int
    rounds: int
    calls: int


def instruments() -> dict[str, tuple[Instrument, ...]]:
    """Return the instruments of each variant, as a process has them."""
    recorder, counters = FlightRecorder(), Metrics()
    return {
        OFF: (),
        RECORDER: (recorder,),
        COUNTERS: (counters,),
        LINE: (),
        REGISTER: (),
        ALL: (recorder, counters),
    }


def measure(plan: Plan, rank: int, store_path: str) -> dict[str, list[float]]:
    """Return the nanoseconds a call took, round by round, for each variant. Runs as one rank."""
    os.environ["DIST2_INSTRUMENTS"] = "0"
    torch.set_num_threads(1)
    store = store_at(store_path, plan.ranks)
    referee = Referee(store, rank, plan.ranks)
    meeting = PrefixStore("dist2", store)
    options: dict[str, Any] = {"transport": plan.transport} if plan.backend == "socket" else {}
    options |= {"store": meeting, "rank": rank, "world_size": plan.ranks}
    with dist2.new_group(plan.backend, 60.0, **options) as pg:
        calls = dict.fromkeys(
            (OFF, RECORDER, COUNTERS), checked_call(without_line(without_register(twin(pg))))
        )
        calls[LINE] = checked_call(without_register(twin(pg)))
        calls[REGISTER] = checked_call(without_line(twin(pg)))
        calls[ALL] = checked_call(pg)
        variants = instruments()
        took: dict[str, list[float]] = {name: [] for name in variants}
        names = list(variants)
        for turn in range(plan.rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                remove = [add_instrument(each) for each in variants[name]]
                for _ in range(100):  # until it is in the caches
                    calls[name]()
                seconds = one_round(calls[name], plan.calls, referee)
                for each in remove:
                    each()
                took[name].append(seconds * 1e9)
    return took


def twin(pg: dist2.ProcessGroup) -> dist2.ProcessGroup:
    """Return another group of the same ranks."""
    other = pg.split(range(pg.size()))
    assert other is not None  # all ranks are in it
    return other


def checked_call(pg: dist2.ProcessGroup) -> Callable[[], object]:
    """Return a callable that calls an 8-byte all_reduce, after a check of its result."""
    tensor = torch.ones(2)
    pg.all_reduce(tensor)
    if pg.info.backend != "fake" and tensor.tolist() != [pg.size()] * 2:
        raise AssertionError(f"all_reduce gave {tensor.tolist()}")
    return partial(pg.all_reduce, tensor.zero_())


def alone(calls: int = 100_000) -> dict[str, float]:
    """Return the nanoseconds that telling the instruments of one operation takes, for each variant."""
    info = GroupInfo("world", "world", "", "fake", 0, (0,))
    metas = (TensorMeta((2,), torch.float32),)
    signature = Signature(OpKind.ALL_REDUCE, info, metas, metas, reduction=SUM)
    cost = {}
    for name, chosen in instruments().items():
        dispatch = Dispatch()
        for each in chosen:
            dispatch.add(each)
        operations = [Operation(signature, seq, 1, 1, False) for seq in range(1000)]
        for operation in operations:
            operation.finished_ns = 5000
        rounds = []
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(calls // 9 // len(operations)):
                for operation in operations:
                    dispatch.started(operation)
                    dispatch.finished(operation)
            rounds.append((time.perf_counter() - start) / (calls // 9 // len(operations) * len(operations)))
        cost[name] = statistics.median(rounds) * 1e9
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="socket")
    parser.add_argument("--transport", default="shm", help="of the socket backend: shm or tcp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=2000, help="a round")
    plan = Plan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        took = in_processes(partial(measure, plan), plan.ranks, f"{folder}/store")[0]
    where = f"{plan.backend} ({plan.transport}), {plan.ranks} ranks"
    print(f"8-byte all_reduce on {where}, {plan.rounds} rounds of {plan.calls}")
    print(f"{'switched on':<20}{'us a call':>12}{'cost, us':>12}{'alone, us':>12}")
    by_itself = alone()
    figures = {}
    for name, rounds in took.items():
        differences = [each - base for each, base in zip(rounds, took[OFF], strict=True)]
        figures[name] = {
            "call_ns": statistics.median(rounds),
            "cost_ns": statistics.median(differences),
            "alone_ns": by_itself[name] - by_itself[OFF],
        }
        print(f"{name:<20}" + "".join(f"{value / 1e3:>12.2f}" for value in figures[name].values()))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"plan": attrs.asdict(plan), "figures": figures, "rounds_ns": took}, indent=1)
    )
    print(f"rounds: {RESULTS}")


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
