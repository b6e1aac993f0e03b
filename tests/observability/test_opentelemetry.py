"""Operations as spans of OpenTelemetry."""

from __future__ import annotations

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support.fake_groups import FakeGroup, info_of

import dist2
from dist2.errors import InvalidUsageError, PeerLostError
from observability.opentelemetry import SpanInstrument


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


def test_a_bad_limit_is_named() -> None:
    with pytest.raises(InvalidUsageError, match="least_s must be positive, got -1"):
        SpanInstrument(least_s=-1)
