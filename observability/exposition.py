"""The counters as Prometheus shows them: a collector that builds every family when it is scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from time import monotonic_ns

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dist2.operation.signature import GroupInfo, Operation
from dist2.security.refusals import refusals
from observability.metrics import DURATIONS, OTHER, Metrics, Series, label_text

FIRST_BOUND, LAST_BOUND = 10, 37
"""Buckets end at 2**10 ns (1 us) to 2**37 ns (137 s)."""

BOUNDS = tuple((place, repr((1 << place) / 1e9)) for place in range(FIRST_BOUND, LAST_BOUND + 1))

SERIES_LABELS = ("op", "group", "backend", "size")
GROUP_LABELS = ("group", "backend")


class MetricsCollector(Collector):
    """Reads a `Metrics` for a Prometheus registry, without a cost between scrapes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Return no names, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family as it is now."""
        series = self._metrics.series()
        in_flight = self._metrics.in_flight()
        groups = self._metrics.board.open_groups()
        yield from _totals(series)
        yield _durations(series)
        yield _errors(self._metrics)
        yield from _in_flight(self._metrics, groups, in_flight)
        yield _sequence_numbers(self._metrics, series, in_flight)
        yield _group_info(self._metrics, groups)
        yield _refused_connections()
        yield _build_info()


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """Return a registry of its own with a process's counters, and its memory, CPU time and descriptors."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    ProcessCollector(registry=registry)
    return registry


def _labels(series: Series) -> tuple[str, str, str, str]:
    return series.key.op, series.key.group, series.key.backend, series.key.size


def _totals(all_series: list[Series]) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "dist2_operations", "Operations that ended, well or badly.", labels=SERIES_LABELS
    )
    nbytes = CounterMetricFamily(
        "dist2_bytes", "Payload bytes of this rank's successful operations.", labels=SERIES_LABELS
    )
    longest = GaugeMetricFamily(
        "dist2_slowest_operation_seconds",
        "The longest successful operation since the start.",
        labels=SERIES_LABELS,
    )
    for series in all_series:
        ended.add_metric(_labels(series), series.succeeded + series.failed)
        nbytes.add_metric(_labels(series), series.nbytes)
        longest.add_metric(_labels(series), series.longest_ns / 1e9)
    yield ended
    yield nbytes
    yield longest


def cumulative_buckets(durations: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return (upper bound in seconds as text, operations at most that long), up to ``+Inf``."""
    buckets = []
    below = sum(durations[:FIRST_BOUND])
    for place, bound in BOUNDS:
        below += durations[place]
        buckets.append((bound, below))
    buckets.append(("+Inf", below + sum(durations[LAST_BOUND + 1 : DURATIONS])))
    return buckets


def _durations(all_series: list[Series]) -> Metric:
    family = HistogramMetricFamily(
        "dist2_operation_duration_seconds",
        "Time from the call of a successful operation to its completion.",
        labels=SERIES_LABELS,
    )
    for series in all_series:
        buckets = cumulative_buckets(series.durations)
        family.add_metric(_labels(series), buckets=buckets, sum_value=series.total_ns / 1e9)
    return family


def _errors(metrics: Metrics) -> Metric:
    family = CounterMetricFamily(
        "dist2_errors", "Operations that failed.", labels=("op", "group", "backend", "error")
    )
    for labels, count in sorted(metrics.errors().items()):
        family.add_metric(labels, count)
    return family


def _in_flight(metrics: Metrics, groups: list[GroupInfo], in_flight: list[Operation]) -> Iterator[Metric]:
    """Yield how many operations run in each group and how old the oldest is; zero where none does."""
    running = GaugeMetricFamily(
        "dist2_operations_in_flight", "Operations that have begun and not ended.", labels=GROUP_LABELS
    )
    oldest = GaugeMetricFamily(
        "dist2_oldest_operation_age_seconds",
        "How long ago the oldest operation in flight was called; 0 with none.",
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
        running.add_metric(labels, count)
        oldest.add_metric(labels, ages[labels])
    yield running
    yield oldest


def _group_labels(metrics: Metrics, info: GroupInfo) -> tuple[str, str]:
    return metrics.label_of(info), label_text(info.backend)


def _sequence_numbers(metrics: Metrics, all_series: list[Series], in_flight: list[Operation]) -> Metric:
    """Return the last number of each group: ranks that should be in step, compared, show a desync."""
    family = GaugeMetricFamily(
        "dist2_last_sequence_number",
        "Number of the last operation of the group that began, or ended, on this rank.",
        labels=(*GROUP_LABELS, "numbering", "state"),
    )
    ended: dict[tuple[str, str, str], int] = {}
    for series in all_series:
        if series.key.group != OTHER:
            numbering = "point_to_point" if series.key.is_p2p else "collective"
            of = (series.key.group, series.key.backend, numbering)
            ended[of] = max(ended.get(of, 0), series.last_seq)
    begun = dict(ended)
    for operation in in_flight:
        numbering = "point_to_point" if operation.signature.kind.is_p2p else "collective"
        of = (*_group_labels(metrics, operation.signature.group), numbering)
        if of[0] != OTHER:
            begun[of] = max(begun.get(of, 0), operation.seq)
    for of, seq in sorted(begun.items()):
        family.add_metric((*of, "begun"), seq)
        family.add_metric((*of, "ended"), ended.get(of, 0))
    return family


def _group_info(metrics: Metrics, groups: list[GroupInfo]) -> Metric:
    family = GaugeMetricFamily(
        "dist2_group_info",
        "An open group, as labels: always 1.",
        labels=(*GROUP_LABELS, "uid", "desc", "rank", "global_rank", "world_size"),
    )
    for info in groups:
        labels = _group_labels(metrics, info)
        if labels[0] != OTHER:
            ranks = (str(info.rank), str(info.global_ranks[info.rank]), str(info.world_size))
            family.add_metric((*labels, label_text(info.uid), label_text(info.desc), *ranks), 1)
    return family


@cache
def dist2_version() -> str:
    """Return the version of the installed package; ``unknown`` where it runs uninstalled."""
    try:
        return version("dist2")
    except PackageNotFoundError:
        return "unknown"


def _build_info() -> Metric:
    family = GaugeMetricFamily(
        "dist2_build_info", "The version of dist2, as a label: always 1.", labels=("version",)
    )
    family.add_metric((dist2_version(),), 1)
    return family


def _refused_connections() -> Metric:
    family = CounterMetricFamily(
        "dist2_connections_refused",
        "Connections that were not let in, or that were not let in elsewhere.",
        labels=("plane", "reason"),
    )
    for labels, count in sorted(refusals.counts().items()):
        family.add_metric(labels, count)
    return family
