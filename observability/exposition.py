"""The counters as Prometheus shows them: a collector that builds every family when it is scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from time import monotonic_ns
from typing import TYPE_CHECKING

import torch
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dist2.group.open_groups import open_groups
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.shared_memory import touched_bytes
from dist2.runtime.usage import usage
from dist2.security.refusals import refusals
from observability.metrics import DURATIONS, OTHER, Metrics, Series, label_text, size_label
from observability.text_format import Family

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup

FIRST_BOUND, LAST_BOUND = 10, 37
"""Buckets end at 2**10 ns (1 us) to 2**37 ns (137 s)."""

BOUNDS = (*(repr((1 << place) / 1e9) for place in range(FIRST_BOUND, LAST_BOUND + 1)), "+Inf")

SERIES_LABELS = ("op", "group", "backend", "rank", "world_size", "size_le_bytes")
GROUP_LABELS = ("group", "backend", "rank")

PAIRWISE_SHARE = frozenset(
    {
        "all_gather", "all_gather_single", "all_gather_single_coalesced", "all_gather_v",
        "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_v",
        "all_to_all", "all_to_all_single", "gather", "scatter",
    }
)  # fmt: skip
"""Operations in which (n - 1) / n of the payload has to cross the bus of a rank, n being the world size."""


class MetricsCollector(Collector):
    """Reads a `Metrics` for a Prometheus registry, without a cost between scrapes."""

    def __init__(self, metrics: Metrics, groups: Callable[[], Iterable[ProcessGroup]] = open_groups) -> None:
        self._metrics = metrics
        self._groups = groups

    def describe(self) -> Iterable[Metric]:
        """Return no names, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family as it is now."""
        series = self._metrics.series()
        in_flight = self._metrics.in_flight()
        groups = self._metrics.statuses.open_groups()
        labelled = [(_labels(each), each) for each in series]
        yield from _totals(labelled)
        yield _durations(labelled)
        yield _errors(self._metrics)
        yield from _in_flight(self._metrics, groups, in_flight)
        yield from _of_open_groups(self._metrics, list(self._groups()))
        yield _sequence_numbers(self._metrics, series, in_flight)
        yield _group_info(self._metrics, groups)
        yield from _connections()
        yield _refused_connections()
        yield _store_requests()
        yield _shared_memory()
        yield _build_info()


def registry_of(
    metrics: Metrics, groups: Callable[[], Iterable[ProcessGroup]] = open_groups
) -> CollectorRegistry:
    """Return a registry of its own with a process's counters, and its memory, CPU time and descriptors.

    Args:
        metrics: The counters.
        groups: Returns the open groups.
    """
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics, groups))
    ProcessCollector(registry=registry)
    return registry


Labelled = tuple[tuple[str, ...], Series]
"""The values of the labels of a series, and the series."""


def _labels(series: Series) -> tuple[str, ...]:
    key = series.key
    return key.op, key.group, key.backend, str(key.rank), str(key.world_size), size_label(key.size)


def bus_share(op: str, world_size: int) -> float:
    """Return how much of an operation's payload has to cross the bus of a rank, as nccl-tests counts it.

    With it, the bandwidth of any number of ranks compares with that of the hardware: an `all_reduce` of n
    ranks has to move 2 (n - 1) / n of its payload, with any algorithm.
    """
    if op == "barrier":
        return 0.0
    others = (world_size - 1) / world_size
    if op.startswith("all_reduce"):
        return 2 * others
    return others if op in PAIRWISE_SHARE else 1.0


def _totals(labelled: list[Labelled]) -> Iterator[Family]:
    ended = Family(
        "dist2_operations", "counter", "Operations that ended, successful or failed.", SERIES_LABELS
    )
    nbytes = Family(
        "dist2_bytes", "counter", "Payload bytes of this rank's successful operations.", SERIES_LABELS
    )
    bus = Family(
        "dist2_bus_bytes",
        "counter",
        "Payload bytes times the share that has to cross a rank's bus, as nccl-tests counts it.",
        SERIES_LABELS,
    )
    longest = Family(
        "dist2_slowest_operation_seconds",
        "gauge",
        "The longest successful operation of the last five minutes; 0 with none.",
        SERIES_LABELS,
    )
    for labels, series in labelled:
        ended.add(labels, series.succeeded + series.failed)
        nbytes.add(labels, series.nbytes)
        bus.add(labels, series.nbytes * bus_share(series.key.op, series.key.world_size))
        longest.add(labels, series.longest_ns / 1e9)
    yield ended
    yield nbytes
    yield bus
    yield longest


def bucket_counts(durations: tuple[int, ...]) -> list[int]:
    """Return the operations in each bucket of `BOUNDS`."""
    first, last = FIRST_BOUND + 1, LAST_BOUND + 1
    return [sum(durations[:first]), *durations[first:last], sum(durations[last:DURATIONS])]


def _durations(labelled: list[Labelled]) -> Family:
    family = Family(
        "dist2_operation_duration_seconds",
        "histogram",
        "Time from the call of a successful operation to its completion.",
        SERIES_LABELS,
        BOUNDS,
    )
    for labels, series in labelled:
        family.add_histogram(labels, bucket_counts(series.durations), series.total_ns / 1e9)
    return family


def _errors(metrics: Metrics) -> Family:
    family = Family("dist2_errors", "counter", "Operations that failed.", ("op", *GROUP_LABELS, "error"))
    for labels, count in sorted(metrics.errors().items()):
        family.add([str(label) for label in labels], count)
    return family


def _in_flight(metrics: Metrics, groups: list[GroupInfo], in_flight: list[Operation]) -> Iterator[Family]:
    """Yield how many operations run in each group and how old the oldest is; zero where none does."""
    running = Family(
        "dist2_operations_in_flight", "gauge", "Operations that have begun and not ended.", GROUP_LABELS
    )
    oldest = Family(
        "dist2_oldest_operation_age_seconds",
        "gauge",
        "Seconds since the call of the oldest operation in flight; 0 with none.",
        labels=GROUP_LABELS,
    )
    now_ns = monotonic_ns()
    counts = {_group_labels(metrics, info): 0 for info in groups}
    ages = dict.fromkeys(counts, 0.0)
    for operation in in_flight:
        labels = _group_labels(metrics, operation.signature.group)
        counts[labels] = counts.get(labels, 0) + 1
        age_s = max(0, now_ns - operation.created_ns) / 1e9
        ages[labels] = max(ages.get(labels, 0.0), age_s)
    for labels, count in sorted(counts.items()):
        running.add(labels, count)
        oldest.add(labels, ages[labels])
    yield running
    yield oldest


def _group_labels(metrics: Metrics, info: GroupInfo) -> tuple[str, str, str]:
    group, backend, rank = metrics.group_key(info)
    return group, backend, str(rank)


def _of_open_groups(metrics: Metrics, groups: list[ProcessGroup]) -> Iterator[Family]:
    """Yield the data of the groups themselves: queued operations, and time waited."""
    depth = Family(
        "dist2_operations_queued", "gauge", "Asynchronous operations that wait for their turn.", GROUP_LABELS
    )
    waited = Family(
        "dist2_peer_wait_seconds",
        "counter",
        "Time inside operations in which this rank waited for others; the rest moved data.",
        labels=GROUP_LABELS,
    )
    queued: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        queued[_group_labels(metrics, group.info)] += len(group.queued())
    for labels, count in sorted(queued.items()):
        depth.add(labels, count)
    for (group_label, backend, rank), waited_ns in sorted(metrics.waited(groups).items()):
        waited.add((group_label, backend, str(rank)), waited_ns / 1e9)
    yield depth
    yield waited


def _sequence_numbers(metrics: Metrics, all_series: list[Series], in_flight: list[Operation]) -> Family:
    """Return the last number of each group: ranks that should be in step, compared, show a desync."""
    family = Family(
        "dist2_last_sequence_number",
        "gauge",
        "Number of the last operation of the group that began, or ended, on this rank.",
        (*GROUP_LABELS, "numbering", "state"),
    )
    ended: dict[tuple[str, ...], int] = {}
    for series in all_series:
        if series.key.group != OTHER:
            numbering = "point_to_point" if series.key.is_p2p else "collective"
            of = (series.key.group, series.key.backend, str(series.key.rank), numbering)
            ended[of] = max(ended.get(of, 0), series.last_seq)
    begun: dict[tuple[str, ...], int] = dict(ended)
    for operation in in_flight:
        numbering = "point_to_point" if operation.signature.kind.is_p2p else "collective"
        running = (*_group_labels(metrics, operation.signature.group), numbering)
        if running[0] != OTHER:
            begun[running] = max(begun.get(running, 0), operation.seq)
    for labels, seq in sorted(begun.items()):
        family.add((*labels, "begun"), seq)
        family.add((*labels, "ended"), ended.get(labels, 0))
    return family


def _group_info(metrics: Metrics, groups: list[GroupInfo]) -> Family:
    family = Family(
        "dist2_group_info",
        "gauge",
        "An open group, as labels: always 1.",
        (*GROUP_LABELS, "uid", "desc", "group_rank", "world_size"),
    )
    for info in groups:
        labels = _group_labels(metrics, info)
        if labels[0] != OTHER:
            ranks = (str(info.rank), str(info.world_size))
            family.add((*labels, label_text(info.uid), label_text(info.desc), *ranks), 1)
    return family


@cache
def dist2_version() -> str:
    """Return the version of the installed package; ``unknown`` where it runs uninstalled."""
    try:
        return version("dist2")
    except PackageNotFoundError:
        return "unknown"


def _build_info() -> Family:
    family = Family(
        "dist2_build_info",
        "gauge",
        "Versions as labels: always 1.",
        ("version", "torch", "python"),
    )
    family.add((dist2_version(), torch.__version__, python_version()), 1)
    return family


def _connections() -> Iterator[Family]:
    open_now = Family("dist2_connections", "gauge", "Open connections to other processes.", ("plane",))
    opened = Family("dist2_connections_opened", "counter", "Connections opened since the start.", ("plane",))
    again = Family(
        "dist2_reconnects", "counter", "Connections that took the place of a broken one.", ("plane",)
    )
    for plane, (now, ever, replaced) in sorted(usage.connections().items()):
        open_now.add((plane,), now)
        opened.add((plane,), ever)
        again.add((plane,), replaced)
    yield open_now
    yield opened
    yield again


def _store_requests() -> Family:
    family = Family("dist2_store_requests", "counter", "Requests sent to store servers.", ("request",))
    for request, count in sorted(usage.requests().items()):
        family.add((request,), count)
    return family


def _shared_memory() -> Family:
    family = Family(
        "dist2_shared_memory_bytes",
        "gauge",
        "Memory that this process shares with others, as far as touched.",
    )
    family.add((), touched_bytes())
    return family


def _refused_connections() -> Family:
    family = Family(
        "dist2_connections_refused",
        "counter",
        "Connections that were refused, here or by the other end.",
        ("plane", "reason"),
    )
    for labels, count in sorted(refusals.counts().items()):
        family.add(labels, count)
    return family
