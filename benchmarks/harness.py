"""Measures contenders side by side: the same tensors, in one run, round by round in turn.

A round runs an operation in a loop of about `ROUND_S` on all ranks at once; its time is that of the
rank that took longest, by call. What is reported is the median over rounds. Results are checked first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from typing import Protocol, TypeVar

import attrs
import torch
from neighbours import Neighbours, Patience
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, ReduceOp, Store
from workloads import SEND_RECV, Case, Workload, WrongResultError

ROUND_S = 0.02
MAX_CALLS = 2000
WARM_UP_CALLS = 5
TIMEOUT = timedelta(seconds=60)

Result = TypeVar("Result")


class Contender(Protocol):
    """Something that runs operations on a fixed set of ranks."""

    name: str

    def bind(self, workload: Workload) -> Callable[[], object]:
        """Return what runs the workload's operation once, to its end.

        Raises:
            NotImplementedError: It has no such operation.
        """

    def close(self) -> None:
        """Give everything back."""


@attrs.frozen
class Measurement:
    """What one contender took for one case.

    Attributes:
        case: Which.
        contender: Whose.
        rounds_s: Seconds a call, one number a round; for `SEND_RECV` half of a round trip.
        failure: Why there are none.
        foreign_cores: How many cores other processes kept busy meanwhile.
    """

    case: Case
    contender: str
    rounds_s: tuple[float, ...] = ()
    failure: str | None = None
    foreign_cores: float = 0.0

    @property
    def median_s(self) -> float | None:
        """The figure that is reported."""
        return statistics.median(self.rounds_s) if self.rounds_s else None


class Referee:
    """Keeps the ranks of a run in step, by means that are not measured.

    Attributes:
        rank: The caller's.
        world_size: How many there are.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = ProcessGroupGloo(PrefixStore("referee", store), rank, world_size, TIMEOUT)

    def latest(self, value: float) -> float:
        """Return the largest value that any rank brings."""
        return self._reduced(value, ReduceOp.MAX)

    def total(self, value: float) -> float:
        """Return the sum of what the ranks bring."""
        return self._reduced(value, ReduceOp.SUM)

    def _reduced(self, value: float, op: ReduceOp.RedOpType) -> float:
        reduced = torch.tensor([value], dtype=torch.float64)
        self._group.allreduce(reduced, op).wait()
        return float(reduced.item())


def in_processes(body: Callable[[int, str], Result], world_size: int, store_path: str) -> list[Result]:
    """Run ``body(rank, store_path)`` in a process for each rank; return what each returned."""
    context = get_context("spawn")
    with ProcessPoolExecutor(world_size, mp_context=context) as pool:
        ranks = [pool.submit(body, rank, store_path) for rank in range(world_size)]
        return [each.result() for each in ranks]


def store_at(path: str, world_size: int) -> Store:
    """Return the store in which the ranks of a run meet: a file, which listens on nothing."""
    return FileStore(path, world_size)


def measure(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    rounds: int,
    referee: Referee,
    patience: Patience = Patience(),  # noqa: B008 - a frozen value
) -> Iterator[list[Measurement]]:
    """Yield the measurements of all contenders, case by case. All ranks call it alike."""
    for case in cases:
        best = _measure_case(contenders, case, rounds, referee)
        for _ in range(patience.retries):
            if best[0].foreign_cores <= patience.foreign_cores:
                break
            time.sleep(patience.pause_s)
            again = _measure_case(contenders, case, rounds, referee)
            best = min(best, again, key=lambda found: found[0].foreign_cores)
        yield best


def _measure_case(
    contenders: Sequence[Contender], case: Case, rounds: int, referee: Referee
) -> list[Measurement]:
    workload = Workload(case, referee.rank, referee.world_size)
    calls: dict[str, Callable[[], object]] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        try:
            call = contender.bind(workload)
            _verify(call, workload)
            calls[contender.name] = call
        except (NotImplementedError, WrongResultError) as error:
            failures[contender.name] = f"{type(error).__name__}: {error}"
        if referee.latest(contender.name in failures):  # one rank's complaint is everyone's
            calls.pop(contender.name, None)
            failures.setdefault(contender.name, "it failed on another rank")
    workload.clear()
    counts = {name: _calls_a_round(call, referee) for name, call in calls.items()}
    neighbours = Neighbours(referee.total)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_one_round(call, counts[name], referee) / _messages(case))
    foreign_cores = referee.latest(neighbours.cores())
    return [
        Measurement(case, name, tuple(times.get(name, ())), failures.get(name), foreign_cores)
        for name in (each.name for each in contenders)
    ]


def _verify(call: Callable[[], object], workload: Workload) -> None:
    for _ in range(2):
        workload.fill()
        call()
        workload.check()


def _calls_a_round(call: Callable[[], object], referee: Referee) -> int:
    """Return how many calls fill a round, the same on all ranks."""
    for _ in range(WARM_UP_CALLS):
        call()
    took_s = _one_round(call, WARM_UP_CALLS, referee)
    return max(3, min(MAX_CALLS, int(ROUND_S / took_s)))


def _one_round(call: Callable[[], object], count: int, referee: Referee) -> float:
    """Return the seconds a call took, on the slowest rank."""
    referee.latest(0.0)
    start = time.perf_counter()
    for _ in range(count):
        call()
    return referee.latest((time.perf_counter() - start) / count)


def _messages(case: Case) -> int:
    return 2 if case.op == SEND_RECV else 1
