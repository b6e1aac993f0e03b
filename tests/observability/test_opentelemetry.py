"""Operations as spans of OpenTelemetry."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support.fake_groups import FakeGroup, info_of

import dist2
from dist2.errors import InvalidUsageError, PeerLostError
from observability.job.verdict import Diagnosis, Waiting
from observability.job.waiting_log import WaitingLog
from observability.opentelemetry import SpanInstrument, observe_metrics


def test_operations_that_take_long_or_fail_become_spans() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    group = FakeGroup(info_of(1), SpanInstrument(provider, least_s=0.001))
    group.run(took_ns=10_000)
    long = group.run(took_ns=20_000_000)
    group.run(error=PeerLostError("rank 0 died"))
    span, failed = exporter.get_finished_spans()
    assert span.name == "dist2.all_reduce"
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == 20_000_000
    assert span.attributes is not None
    assert span.attributes["dist2.rank"] == 1
    assert span.attributes["dist2.seq"] == long.seq == 2
    assert span.attributes["dist2.bytes"] == 8
    assert span.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "PeerLostError: rank 0 died"


def test_spans_of_a_real_group_are_those_of_the_caller() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with dist2.new_group("fake", rank=0, world_size=2) as pg:
        remove = dist2.add_instrument(SpanInstrument(provider, least_s=0))
        try:
            with tracer.start_as_current_span("step"):
                pg.all_reduce(torch.ones(2))
        finally:
            remove()
    inner, outer = exporter.get_finished_spans()
    assert outer.context is not None
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id


@pytest.mark.filterwarnings("ignore:`LoggingHandler`:DeprecationWarning")  # it moves to another package
def test_a_wait_of_the_job_is_a_log_record_with_attributes() -> None:
    exporter: Any = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    handler = LoggingHandler(logger_provider=provider)
    logging.getLogger("dist2").addHandler(handler)
    try:
        waiting = Waiting(("uid", 7, False, -1), "g", "barrier", "barrier()", "", (0,), 6.0, ())
        found = Diagnosis(verdict=("rank 2 sleeps",), culprits=(2,), waiting=(waiting,))
        WaitingLog(quiet_s=15.0).diagnosed(0, found)
    finally:
        logging.getLogger("dist2").removeHandler(handler)
    (sent,) = exporter.get_finished_logs()
    assert sent.log_record.body == "the job waits for 6.0 s: rank 2 sleeps"
    assert sent.log_record.severity_text == "WARN"
    assert sent.log_record.attributes is not None
    assert sent.log_record.attributes["culprits"] == (2,)


def test_a_bad_limit_is_named() -> None:
    with pytest.raises(InvalidUsageError, match="least_s must be positive, got -1"):
        SpanInstrument(least_s=-1)


def test_a_collective_has_one_trace_on_all_ranks() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = SpanInstrument(provider, least_s=0, one_trace=True)
    ranks = [FakeGroup(info_of(rank), spans) for rank in range(2)]
    with provider.get_tracer("test").start_as_current_span("step") as caller:
        for group in ranks:
            group.run()
            group.run()
    first, second, other_first, other_second, step = exporter.get_finished_spans()
    traces = [each.context.trace_id for each in (first, second, other_first, other_second) if each.context]
    assert traces[0] == traces[2] != traces[1] == traces[3]
    assert step.context is not None
    assert step.context.trace_id not in traces
    assert [link.context.span_id for link in first.links] == [caller.get_span_context().span_id]


def test_the_counters_are_metrics_of_opentelemetry() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_metrics(provider)
    with dist2.new_group("fake", rank=0, world_size=2, name="observed") as pg:
        pg.all_reduce(torch.ones(2))
        data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {
        metric.name: getattr(point, "value", None)
        for metric in scope.metrics
        for point in metric.data.data_points
        if (point.attributes or {}).get("group") == "observed"
    }
    assert found["dist2_operations"] == found["dist2_operation_duration_seconds_count"] == 1
    assert found["dist2_operations_queued"] == 0
    assert found["dist2_bytes"] == 8
