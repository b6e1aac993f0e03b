"""Ranks of a script in processes, in step by means that are not measured.

For questions that are no comparison of whole cases. `dist2.cli.bench`, which ``dist2 bench`` runs,
measures those; the scripts use its cases, peers, texts and plots as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

import torch
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, ReduceOp, Store

TIMEOUT = timedelta(seconds=60)
_LEAD_S = 0.005
"""How long after the last has come all start: all sleep by then."""

ROUND_S = 0.03
"""How long a contender is measured before the next one is."""
_MAX_CALLS = 500

Result = TypeVar("Result")


class Referee:
    """Keeps the ranks of a run in step, by means that are not measured.

    Attributes:
        rank: The caller's.
        world_size: How many there are.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: Any = ProcessGroupGloo(PrefixStore("referee", store), rank, world_size, TIMEOUT)

    def latest(self, value: float) -> float:
        """Return the largest value that any rank brings."""
        return self._reduced(value, ReduceOp.MAX)

    def total(self, value: float) -> float:
        """Return the sum of the ranks' values."""
        return self._reduced(value, ReduceOp.SUM)

    def now(self) -> float:
        """Return once all ranks have come, as a collective returns, and when it did (`time.monotonic`)."""
        self.latest(0.0)
        return time.monotonic()

    def start(self) -> float:
        """Return on all ranks at one moment, and which it is (`time.monotonic`): nobody is late or early."""
        moment = self.latest(time.monotonic()) + _LEAD_S
        time.sleep(max(0.0, moment - time.monotonic()))
        return moment

    def _reduced(self, value: float, op: ReduceOp.RedOpType) -> float:
        reduced = torch.tensor([value], dtype=torch.float64)
        self._group.allreduce(reduced, op).wait()
        return float(reduced.item())


def in_processes(body: Callable[[int, str], Result], world_size: int, store_path: str) -> list[Result]:
    """Run ``body(rank, store_path)`` in a process for each rank; return the results, by rank."""
    context = get_context("spawn")
    with ProcessPoolExecutor(world_size, mp_context=context) as pool:
        ranks = [pool.submit(body, rank, store_path) for rank in range(world_size)]
        try:
            return [each.result() for each in ranks]
        except KeyboardInterrupt:
            for process in active_children():  # the pool would wait until they are done
                process.kill()
            raise


def store_at(path: str, world_size: int) -> Store:
    """Return the store in which the ranks of a run meet: a file, which listens on nothing."""
    return FileStore(path, world_size)


def in_turn(
    calls: Mapping[str, Callable[[], object]], rounds: int, referee: Referee
) -> dict[str, list[float]]:
    """Measure calls in turn; return the seconds of one, on the slowest rank, for each round."""
    counts = {
        name: max(3, min(_MAX_CALLS, int(ROUND_S / one_round(call, 3, referee))))
        for name, call in calls.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(one_round(call, counts[name], referee))
    return taken


def one_round(call: Callable[[], object], count: int, referee: Referee) -> float:
    """Return the seconds a call took, on the slowest rank."""
    referee.latest(0.0)
    start = time.perf_counter()
    for _ in range(count):
        call()
    return referee.latest((time.perf_counter() - start) / count)
