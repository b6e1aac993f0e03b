"""The text of the metrics: as the library of Prometheus writes and reads it, in a fraction of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest as as_text
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import Collector
from support.fake_groups import FakeGroup, info_of
from support.time_limits import in_time

from observability.exposition import registry_of
from observability.metrics import Metrics
from observability.text_format import Family, text_of

Samples = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]


class Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def families() -> list[Metric]:
    plain = Family("a", "gauge", 'Of "all" \\ none.')
    plain.add((), float("inf"))
    plain_nan = Family("n", "gauge", "No number.")
    plain_nan.add((), -2.5e-9)
    counter = Family("b", "counter", "Counted.", ("group", "op"))
    counter.add(('x"\\\n%d', "é"), 3)
    counter.add(("", "é"), 2**70)
    histogram = Family("c_seconds", "histogram", "Times.", ("op",), ("0.5", "1.0", "+Inf"))
    histogram.add_histogram(("100%s",), [1, 2, 0], 1.5)
    return [plain, plain_nan, counter, histogram]


def read(text: str, parser: Callable[[str], Iterable[Metric]]) -> Samples:
    return [
        (
            *(family.name, family.type, family.documentation),
            [(each.name, dict(each.labels), each.value) for each in family.samples],
        )
        for family in parser(text)
    ]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_it_is_read_as_that_of_the_library(openmetrics: bool) -> None:
    registry = CollectorRegistry()
    registry.register(Fixed(families()))
    parser, encoder = (read_openmetrics, as_openmetrics) if openmetrics else (read_text, as_text)
    encoded: Any = encoder
    assert read(text_of(families(), openmetrics), parser) == read(encoded(registry).decode(), parser)


def test_64_groups_cost_little() -> None:
    metrics = Metrics()
    for number in range(64):
        group = FakeGroup(info_of(uid=f"group-{number}"), metrics)
        for _ in range(3):
            group.run()
    registry = registry_of(metrics)
    text_of(registry.collect())
    began = time.process_time()
    text = text_of(registry.collect())
    took_s = time.process_time() - began
    assert text.count("dist2_operation_duration_seconds_bucket{") == 64 * 29
    in_time(took_s, 0.02)
