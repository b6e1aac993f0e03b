"""Steps of a training loop: their time, and the shares of operations and of waiting for other ranks in it.

A step compares the totals of the counters at its end with those at its begin, so operations pay nothing. An
operation belongs to the step in which it ends. Asynchronous operations run beside the computation, so the
time inside operations may be longer than the step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import median
from time import monotonic_ns, time
from typing import TYPE_CHECKING, Any

import attrs
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dist2.group.open_groups import open_groups
from observability.exposition import BOUNDS, bucket_counts
from observability.flight_recorder import global_rank
from observability.job.steps import is_slow
from observability.metrics import DURATIONS, GroupKey, Metrics, instrument, label_text
from observability.text_format import Family

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from dist2.group.process_group import ProcessGroup

KEPT = 64
"""Steps of a loop that are kept, the base of its typical times."""
MAX_LOOPS = 16
"""Loops with labels of their own; further ones are not recorded."""

_inside: ContextVar[frozenset[str]] = ContextVar("dist2_steps", default=frozenset())
"""The loops of which this thread or task is in a step."""


@attrs.frozen
class Times:
    """Parts of a step, in seconds.

    Attributes:
        step_s: The whole step.
        operations_s: Time inside operations.
        waited_s: The part of that in which this rank waited for others.
    """

    step_s: float
    operations_s: float
    waited_s: float


@attrs.frozen
class Step:
    """A step that ended.

    Attributes:
        number: In its loop, from 1.
        ended_s: End in seconds since the epoch.
        times: Of all groups together.
        groups: Nanoseconds inside operations, and waited, by group.
    """

    number: int
    ended_s: float
    times: Times
    groups: Mapping[GroupKey, tuple[int, int]]


class Loop:
    """The steps of one name on one rank.

    Attributes:
        name: As the metrics label it.
        rank: The rank in the job.
        number: Steps so far, those that raised included: ranks compare steps by their numbers, and one rank
            alone may have raised.
        latest: The last steps that did not raise, the newest last.
        durations: Number of steps by the bit length of their nanoseconds, as `Series.durations`.
        total_ns: Sum of their times.
        groups: Nanoseconds inside operations, and waited, by group, of all steps.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.number = 0
        self.latest: deque[Step] = deque(maxlen=KEPT)
        self.durations = [0] * DURATIONS
        self.total_ns = 0
        self.groups: dict[GroupKey, tuple[int, int]] = {}

    def add(self, took_ns: int, groups: Mapping[GroupKey, tuple[int, int]]) -> None:
        """Measure the step that was counted last."""
        inside, waited = (sum(each[place] for each in groups.values()) for place in (0, 1))
        times = Times(took_ns / 1e9, inside / 1e9, waited / 1e9)
        self.durations[min(took_ns.bit_length(), DURATIONS - 1)] += 1
        self.total_ns += took_ns
        for key, (inside, waited) in groups.items():
            before = self.groups.get(key, (0, 0))
            self.groups[key] = before[0] + inside, before[1] + waited
        self.latest.append(Step(self.number, time(), times, groups))

    def typical(self) -> Times:
        """Return the median of each part over the last steps."""
        times = [each.times for each in list(self.latest)]  # a copy: a step may end meanwhile
        return Times(*(median(values) for values in zip(*map(attrs.astuple, times), strict=True)))

    def document(self, most: int) -> dict[str, Any]:
        """Return the last steps, and the last slow ones, as plain data for other ranks."""
        kept, typical = list(self.latest), self.typical()
        slow = [each for each in kept if is_slow(each.times.step_s, typical.step_s)]
        return {
            "name": self.name,
            "typical": attrs.asdict(typical),
            "latest": [
                {
                    "number": step.number,
                    "ended_s": step.ended_s,
                    **attrs.asdict(step.times),
                    "groups": {
                        key[0]: {"operations_s": inside / 1e9, "waited_s": waited / 1e9}
                        for key, (inside, waited) in step.groups.items()
                    },
                }
                for step in kept
                if step in kept[-most:] or step in slow[-most:]
            ],
        }


class Steps:
    """The loops of a process.

    Args:
        metrics: Its counters.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loops: dict[tuple[str, int], Loop] = {}
        self._lock = threading.Lock()

    def loops(self) -> list[Loop]:
        """Return all loops, the one that ended a step last first."""
        with self._lock:
            found = [loop for loop in self._loops.values() if loop.latest]
        return sorted(found, key=lambda loop: -loop.latest[-1].ended_s)

    def begin(self) -> Running:
        """Return a step that begins now."""
        return Running(monotonic_ns(), self._totals())

    def end(self, running: Running, name: str, rank: int, *, raised: bool = False) -> None:
        """Count a step of a loop that ends now, and measure it unless it raised."""
        took_ns = monotonic_ns() - running.began_ns
        groups = {}
        for key, (inside, waited) in self._totals().items():
            before = running.totals.get(key, (0, 0))
            if key[2] == rank and (inside, waited) != before:
                groups[key] = inside - before[0], waited - before[1]
        with self._lock:
            loop = self._loops.get((name, rank))
            if loop is None:
                if len(self._loops) >= MAX_LOOPS:
                    return
                loop = self._loops[name, rank] = Loop(name, rank)
            loop.number += 1
            if not raised:
                loop.add(took_ns, groups)

    def _totals(self) -> dict[GroupKey, tuple[int, int]]:
        waited = self._metrics.waited(open_groups())
        return {key: (inside, waited.get(key, 0)) for key, inside in self._metrics.times().items()}


@attrs.frozen
class Running:
    """A step that has begun.

    Attributes:
        began_ns: Monotonic nanosecond of its begin.
        totals: Nanoseconds inside operations, and waited, by group until then.
    """

    began_ns: int
    totals: Mapping[GroupKey, tuple[int, int]]


class StepCollector(Collector):
    """The steps of a process as metrics.

    Args:
        steps: Its loops.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def describe(self) -> Iterable[Metric]:
        """Return no names, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family as it is now."""
        took = Family(
            *("dist2_step_duration_seconds", "histogram", "Time of a step of a loop."),
            ("loop", "rank"),
            BOUNDS,
        )
        inside, waited = (
            Family(f"dist2_step_{name}_seconds", "counter", words, ("loop", "group", "backend", "rank"))
            for name, words in (
                ("operation", "Time inside operations that ended in steps of a loop."),
                ("peer_wait", "Time in which this rank waited for others, in steps of a loop."),
            )
        )
        for loop in self._steps.loops():
            counts = bucket_counts(tuple(loop.durations))
            took.add_histogram((loop.name, str(loop.rank)), counts, loop.total_ns / 1e9)
            for (group, backend, rank), (inside_ns, waited_ns) in sorted(loop.groups.items()):
                labels = (loop.name, group, backend, str(rank))
                inside.add(labels, inside_ns / 1e9)
                waited.add(labels, waited_ns / 1e9)
        yield from (took, inside, waited)


steps = Steps(instrument)
"""Those of this process."""


@contextmanager
def step(group: ProcessGroup | None = None, *, name: str = "train") -> Iterator[None]:
    """Measure one step of a loop: its time, and the time inside operations and waiting for other ranks.

    The metrics ``dist2_step_...``, the page, ``dist2 top`` and ``/job`` show it. Of a step that takes much
    longer than usual, they name the rank that caused it, and whether it computed or moved data. A step that
    raises has a number, but is not measured. A step inside of one of the same name is part of that one.

    Args:
        group: The group whose rank takes the step, where ranks are threads; by default the first open one.
        name: Name of the loop, such as ``train`` or ``validate``.

    Examples:
        >>> for _ in range(2):
        ...     with observability.step(pg):
        ...         pg.all_reduce(torch.ones(2))
    """
    label = label_text(name)
    if label in _inside.get():
        yield
        return
    _inside.set(_inside.get() | {label})
    running, raised = steps.begin(), True
    try:
        yield
        raised = False
    finally:
        _inside.set(_inside.get() - {label})
        steps.end(running, label, _rank_of(group), raised=raised)


def steps_of(
    optimizer: Optimizer, group: ProcessGroup | None = None, *, name: str = "train"
) -> RemovableHandle:
    """Measure steps of an optimizer: each from the end of one ``optimizer.step`` to that of the next.

    Inside of `step` with the same name nothing is measured. Where an optimizer steps several times in an
    iteration, use `step` instead: parts of unequal length have no usual time.

    Args:
        optimizer: The optimizer.
        group: As of `step`.
        name: As of `step`.

    Returns:
        A handle; its method ``remove`` ends the measurement.

    Examples:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        >>> handle = observability.steps_of(optimizer, pg)
        >>> optimizer.step()
        >>> handle.remove()
    """
    label, running = label_text(name), steps.begin()

    def ended(*_: object) -> None:
        nonlocal running
        if label not in _inside.get():
            steps.end(running, label, _rank_of(group))
        running = steps.begin()

    return optimizer.register_step_post_hook(ended)


def _rank_of(group: ProcessGroup | None) -> int:
    infos: Iterable[Any] = (each.info for each in (open_groups() if group is None else (group,)))
    return next((global_rank(info) for info in infos), 0)
