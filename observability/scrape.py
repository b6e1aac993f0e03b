"""Read a control plane's `/metrics` back as numbers: values, quantiles, and which rank is slow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping

import attrs
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dist2 import ProcessGroup
from dist2.errors import ArgumentTypeError, InvalidUsageError
from observability.client import fetch, require_http

DURATIONS = "dist2_operation_duration_seconds"
"""The histogram of how long operations took."""

STRAGGLER_SECONDS = "dist2_straggler_seconds_total"
"""By how much stragglers arrived late, by their rank: exported by the rank that watches."""


@attrs.frozen(eq=False)
class Scrape:
    """The metrics of one process at one moment.

    Attributes:
        families: By name; counters without their ``_total``.

    Examples:
        >>> scrape = observability.parse_metrics("jobs_total 3\\n")
        >>> sorted(scrape.families)
        ['jobs_total']
    """

    families: Mapping[str, Metric]

    def samples(self, name: str, **labels: str) -> Iterator[Sample]:
        """Yield the samples of a name (``dist2_operations_total``) that bear all these labels.

        Args:
            name: Name of the samples, with their suffix.
            labels: Labels that must match.

        Examples:
            >>> scrape = observability.parse_metrics('jobs_total{op="send"} 3\\n')
            >>> [sample.value for sample in scrape.samples("jobs_total", op="send")]
            [3]
        """
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    yield sample

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that bear all these labels; 0 without any.

        Args:
            name: Name of the samples, with their suffix.
            labels: Labels that must match.

        Examples:
            >>> observability.parse_metrics('jobs_total{op="send"} 3\\n').value("jobs_total")
            3.0
        """
        return math.fsum(sample.value for sample in self.samples(name, **labels))

    def label_values(self, name: str, label: str) -> list[str]:
        """Return the values that a label has among the samples of a name.

        Args:
            name: Name of the samples, with their suffix.
            label: Name of the label.

        Examples:
            >>> scrape = observability.parse_metrics('jobs_total{op="send"} 3\\n')
            >>> scrape.label_values("jobs_total", "op")
            ['send']
        """
        return sorted({sample.labels.get(label, "") for sample in self.samples(name)})

    def buckets(self, name: str = DURATIONS, **labels: str) -> list[tuple[float, float]]:
        """Return (upper bound, samples at most that large) of the histograms that bear all these labels.

        Args:
            name: Name of the histogram.
            labels: Labels that must match.

        Examples:
            >>> text = '# TYPE took histogram\\ntook_bucket{le="1"} 2\\ntook_bucket{le="+Inf"} 3\\n'
            >>> scrape = observability.parse_metrics(text)
            >>> scrape.buckets("took")
            [(1.0, 2.0), (inf, 3.0)]
        """
        summed: dict[float, float] = {}
        for sample in self.samples(f"{name}_bucket", **labels):
            bound = float(sample.labels["le"])
            summed[bound] = summed.get(bound, 0.0) + sample.value
        return sorted(summed.items())

    def quantile(self, q: float, name: str = DURATIONS, **labels: str) -> float:
        """Estimate a quantile of the histograms that bear all these labels; NaN where they are empty.

        Args:
            q: 0.5 for the median.
            name: The histogram.
            labels: Labels that must match, such as ``op="all_reduce"``.

        Raises:
            InvalidUsageError: ``q`` is not between 0 and 1.

        Examples:
            >>> text = '# TYPE took histogram\\ntook_bucket{le="1"} 2\\ntook_bucket{le="+Inf"} 2\\n'
            >>> scrape = observability.parse_metrics(text)
            >>> scrape.quantile(0.5, "took")
            0.5
        """
        return quantile_of(self.buckets(name, **labels), q)


def quantile_of(buckets: Iterable[tuple[float, float]], q: float) -> float:
    """Estimate a quantile from cumulative buckets: linear inside the bucket that holds it.

    As Prometheus's `histogram_quantile` does: the first bucket begins at 0, and where the quantile is
    beyond the last finite bound, that bound is the answer.

    Args:
        buckets: (upper bound, count of samples at most that large), by bound; the last bound infinite.
        q: Between 0 and 1.
    """
    if not isinstance(q, (int, float)) or not 0 <= q <= 1:
        raise InvalidUsageError(f"q must be between 0 and 1, got {q!r}")
    ladder = list(buckets)
    total = ladder[-1][1] if ladder else 0.0
    if not total:
        return math.nan
    wanted = q * total
    lower, below = 0.0, 0.0
    for bound, count in ladder:
        if count >= wanted and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * max(0.0, wanted - below) / (count - below)
        lower, below = bound, count
    return lower


def parse_metrics(text: str) -> Scrape:
    """Read the text format of Prometheus.

    Args:
        text: The body of an answer of `/metrics`.

    Raises:
        ValueError: It is not that format.

    Examples:
        >>> observability.parse_metrics("jobs_total 3\\n").value("jobs_total")
        3.0
    """
    return Scrape({family.name: family for family in text_string_to_metric_families(text)})


def read_metrics(url: str, token: str | None = None, *, timeout_s: float = 5.0) -> Scrape:
    """Scrape a control plane.

    Args:
        url: `Server.url`, with or without ``/metrics``.
        token: `Server.token`; by default the one derived from ``DIST2_SECRET``, where that is set.
        timeout_s: Limit of each wait for the server.

    Raises:
        InvalidUsageError: The URL or the token cannot be one, or the URL leaves this host unencrypted.
        urllib.error.HTTPError: It refused; 401 for a wrong token.
        OSError: It cannot be reached.

    Examples:
        >>> with observability.start(pg, announce=False) as server:
        ...     pg.barrier()
        ...     scrape = observability.read_metrics(server.url, server.token)
        >>> scrape.value("dist2_errors_total", group="none")
        0.0
    """
    require_http(url)
    base = url.removesuffix("/").removesuffix("/metrics")
    return parse_metrics(fetch(f"{base}/metrics", token, timeout_s=timeout_s).decode("utf-8"))


def slowest_rank(
    source: ProcessGroup | str | Mapping[int, Scrape] | None = None, token: str | None = None
) -> int | None:
    """Return the rank that costs the job most by arriving late at collectives; None if no rank does.

    It compares when all ranks called the same operations, and noise names no rank. See
    `observability.stragglers`.

    Args:
        source: `Server.url` of any rank, for the verdict of the control plane that watches; by default that
            of this process. Or metrics by rank, those of the lowest rank included: then the rank that cost
            most since the start. Or a group, without any control plane: then all of its ranks must call
            this, and it judges the operations that their flight recorders still have.
        token: `Server.token`; by default the one derived from ``DIST2_SECRET``, where that is set.

    Raises:
        InvalidUsageError: There are no metrics, or the URL or the token cannot be one; or there is no
            control plane in this process, or, for a group, no flight recorder.
        urllib.error.HTTPError: The control plane refused; 401 for a wrong token.
        OSError: It cannot be reached.

    Examples:
        >>> with observability.start(pg, announce=False) as server:
        ...     print(observability.slowest_rank(server.url, server.token))
        None
        >>> observability.slowest_rank(pg) is None
        True
    """
    if isinstance(source, ProcessGroup):
        from observability.group_stragglers import slowest_in

        return slowest_in(source)
    if source is None:
        from observability.server import running

        servers = running()
        if not servers:
            raise InvalidUsageError("no control plane runs in this process: give source, or call start")
        source, token = servers[0].url, servers[0].token
    if isinstance(source, str):
        found = json.loads(fetch(f"{source.removesuffix('/')}/stragglers", token))["stragglers"]
        return int(found[0]["rank"]) if found else None
    if not isinstance(source, Mapping):
        name = type(source).__name__
        raise ArgumentTypeError(f"source must be a group, a URL, or a dict by rank, got {name}")
    if not source:
        raise InvalidUsageError("source must hold the metrics of at least one rank")
    late_s: dict[int, float] = {}
    for scrape in source.values():
        for sample in scrape.samples(STRAGGLER_SECONDS):
            rank = int(sample.labels["rank"])
            late_s[rank] = late_s.get(rank, 0.0) + sample.value
    return max(late_s, key=lambda rank: late_s[rank], default=None)
