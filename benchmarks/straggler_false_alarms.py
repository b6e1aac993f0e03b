"""False alarms of the watch for stragglers: a job without late ranks, beside any other load of the machine.

    python benchmarks/straggler_false_alarms.py                          # an hour, 4 ranks
    python benchmarks/straggler_false_alarms.py --seconds 600 --ranks 8
    python benchmarks/straggler_false_alarms.py --seconds 60 --late 2    # the control: rank 2 has to be named

All ranks do the same: they sleep as long as a step takes, with exponential jitter that differs from rank to
rank, and call an all_reduce. So a rank that the watch names is a false alarm, or its core was taken away for
seconds; the report has the sentence, and the load of the machine at that time, for each. Run it beside other
programs: without noise the result says little.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from harness import in_processes, store_at
from torch.distributed import PrefixStore

import dist2
import observability
from dist2.cli.bench.stopping import stop_as_by_ctrl_c

RESULTS = Path(__file__).parent / "results" / "straggler_false_alarms.json"

LATE_S = 0.05


@attrs.frozen
class Job:
    """Settings: duration, number of ranks, how long a step takes, how much of it varies, ranks 50 ms late."""

    seconds: float
    ranks: int
    step_ms: float
    jitter: float
    late: list[int]


class Alarms(logging.Handler):
    """Records the alarms of the watch: start, rank, and load of the machine."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.since = time.monotonic()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a sentence of the watch."""
        self.found.append(
            {
                "after_s": round(time.monotonic() - self.since, 1),
                "sentence": record.getMessage(),
                "load": os.getloadavg()[0],
            }
        )


def run(job: Job, rank: int, store_path: str) -> dict[str, Any]:
    """Take part in the job; return the alarms of the watch in this process, and its judgements."""
    torch.set_num_threads(1)
    alarms = Alarms()
    logging.getLogger("dist2.stragglers").addHandler(alarms)
    store = PrefixStore("dist2", store_at(store_path, job.ranks))
    draw, loads = random.Random(rank), [os.getloadavg()[0]]
    steps, ends = 0, time.monotonic() + job.seconds
    group = dist2.new_group("socket", 120.0, store=store, rank=rank, world_size=job.ranks, name="training")
    with group as pg, observability.start(pg, announce=False) as server:
        over = torch.zeros(1024)
        while not over[0]:
            time.sleep(job.step_ms / 1e3 * (1 - job.jitter + draw.expovariate(1 / job.jitter)))
            time.sleep(LATE_S if rank in job.late else 0.0)
            over.fill_(float(rank == 0 and time.monotonic() > ends))
            pg.all_reduce(over)
            steps += 1
            if steps % 1000 == 0:
                loads.append(os.getloadavg()[0])
        judged = json.loads(observability.fetch(f"{server.url}/stragglers", server.token))
        pg.barrier()
    return {
        "alarms": alarms.found,
        "steps": steps,
        "loads": loads,
        "silent": judged["silent"],
        "ranking": judged["ranking"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--jitter", type=float, default=0.2, help="mean variation, as a fraction of a step")
    parser.add_argument(
        "--late", type=int, action="append", default=[], help="a rank that is late: repeatable"
    )
    job = Job(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        ranks = in_processes(partial(run, job), job.ranks, f"{folder}/store")
    watching = ranks[0]  # the watch of the lowest rank judges
    loads = sorted(watching["loads"])
    print(
        f"{job.ranks} ranks, {job.seconds:.0f} s, {watching['steps']} all_reduce, "
        f"load {loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}"
    )
    judged = max((row["operations"] for row in watching["ranking"]), default=0)
    print(f"the last verdict is from {judged} operations; without an answer: {watching['silent'] or 'none'}")
    print(f"alarms: {len(watching['alarms'])}")
    for each in watching["alarms"]:
        print(f"  after {each['after_s']} s, load {each['load']:.1f}: {each['sentence']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"job": attrs.asdict(job), **watching}, indent=1))


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
