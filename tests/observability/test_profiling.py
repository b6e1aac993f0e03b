"""Operations in the traces of torch's profiler, and as spans of OpenTelemetry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support.fake_groups import FakeGroup, info_of
from support.ranks import Tenant, run_ranks
from torch.profiler import ProfilerActivity, profile

import dist2
import observability
from dist2 import ProcessGroup
from dist2.errors import InvalidUsageError, PeerLostError
from dist2.operation.instruments import dispatch
from observability.opentelemetry import SpanInstrument

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})


def test_the_profiler_shows_operations_and_without_it_nothing_is_paid(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            return _operations(pg)
        before = dispatch.instruments
        with profile(activities=[ProfilerActivity.CPU]) as recorded, observability.in_profiles():
            assert len(dispatch.instruments) == len(before) + 1
            _operations(pg)
        assert dispatch.instruments == before
        recorded.export_chrome_trace(str(path))
        return None

    def _operations(pg: ProcessGroup) -> None:
        tensor = torch.ones(4)
        pg.all_reduce(tensor)
        pg.all_reduce(tensor, async_op=True).wait()
        if pg.rank() == 0:
            pg.isend(tensor, 1).wait()
        else:
            pg.recv(tensor, 0)
        pg.barrier()

    run_ranks(2, body, INPROC)
    events = json.loads(path.read_text())["traceEvents"]
    names = [each["name"] for each in events if str(each.get("name")).startswith("dist2:")]
    assert names.count("dist2:barrier") >= 1
    assert names.count("dist2:all_reduce") >= 2
    assert all(each["dur"] > 0 for each in events if str(each.get("name")).startswith("dist2:"))


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
