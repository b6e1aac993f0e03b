"""Operations as spans of OpenTelemetry, and the counters as its metrics.

The extra ``dist2[opentelemetry]`` has the API; the program configures the SDK and its exporter. A span
costs tens of microseconds, so that short operations are left out unless the caller says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from dist2.errors import BackendUnavailableError
from dist2.operation.record import Operation
from dist2.runtime.deadline import seconds
from observability.exposition import MetricsCollector
from observability.flight_recorder import global_rank
from observability.metrics import instrument
from observability.steps import StepCollector, steps

try:
    from opentelemetry import metrics, trace
except ModuleNotFoundError as error:
    raise BackendUnavailableError(
        "this needs opentelemetry-api: pip install 'dist2[opentelemetry]'"
    ) from error

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, Observation
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from dist2.group.process_group import ProcessGroup


class SpanInstrument:
    """An instrument that makes a span of each operation: give it to `dist2.add_instrument`.

    Spans are children of the span that is current where the operation ends: for synchronous operations that
    of the caller.

    Args:
        tracer_provider: Where spans go; the global one by default.
        least_s: Operations that take less have no span, unless they fail.
        one_trace: The spans of one collective have the same trace id on all ranks, and a link to the
            span of the caller instead of being its children. Samplers that decide by the trace id then
            keep or drop a collective on all ranks.

    Raises:
        BackendUnavailableError: On import, where the extra is not installed.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        *,
        least_s: float = 0.001,
        one_trace: bool = False,
    ) -> None:
        self._one_trace = one_trace
        self._tracer = trace.get_tracer("dist2", tracer_provider=tracer_provider)
        self._least_ns = int(seconds(least_s, "least_s") * 1e9) if least_s else 0

    def group_opened(self, group: ProcessGroup) -> None:
        """Take no notice."""

    def group_closed(self, group: ProcessGroup) -> None:
        """Take no notice."""

    def operation_started(self, operation: Operation) -> None:
        """Take no notice: a span is made with both its times when it is over."""

    def operation_finished(self, operation: Operation) -> None:
        """Make a span."""
        took_ns = operation.finished_ns - operation.created_ns
        if took_ns < self._least_ns and operation.error is None:
            return
        epoch_ns = time.time_ns() - time.monotonic_ns()
        signature, error = operation.signature, operation.error
        is_shared = (
            self._one_trace and not signature.kind.is_p2p
        )  # a message has other numbers at its two ends
        caller = trace.get_current_span().get_span_context()
        span = self._tracer.start_span(
            f"dist2.{signature.kind.value}",
            context=_context_of(operation) if is_shared else None,
            links=[trace.Link(caller)] if is_shared and caller.is_valid else None,
            kind=trace.SpanKind.CLIENT,
            start_time=operation.created_ns + epoch_ns,
            attributes={
                "dist2.op": signature.kind.value,
                "dist2.group": signature.group.name,
                "dist2.group.uid": signature.group.uid,
                "dist2.backend": signature.group.backend,
                "dist2.rank": global_rank(signature.group),
                "dist2.world_size": signature.group.world_size,
                "dist2.seq": operation.seq,
                "dist2.bytes": signature.nbytes,
                "dist2.queued_s": max(0, operation.started_ns - operation.created_ns) / 1e9,
                "code.function": "" if operation.code is None else operation.code.co_qualname,
                "code.filepath": "" if operation.code is None else operation.code.co_filename,
                "code.lineno": operation.line,
            },
        )
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end(operation.finished_ns + epoch_ns)


def _context_of(operation: Operation) -> Context:
    """Return a parent that all ranks derive from the collective: the uid of the group and the number."""
    key = f"{operation.signature.group.uid} {operation.seq}".encode()
    digest = blake2b(key, digest_size=24).digest()
    parent = trace.SpanContext(
        trace_id=int.from_bytes(digest[:16]) or 1,
        span_id=int.from_bytes(digest[16:]) or 1,
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def observe_metrics(meter_provider: metrics.MeterProvider | None = None) -> None:
    """Show the metrics of this process to OpenTelemetry, which exports them by OTLP or as the program says.

    They have the names of ``/metrics``, without ``_total``; ``process_*`` is left out, and so are waits and
    stragglers, which a control plane finds out. A histogram becomes two counters, ``_count`` and ``_sum``:
    the API has no histogram that is read. Nothing is read between two exports.

    Args:
        meter_provider: Where the metrics go; the global one by default.

    Raises:
        BackendUnavailableError: On import, where the extra is not installed.
    """
    meter = metrics.get_meter("dist2", meter_provider=meter_provider)
    for collector in (MetricsCollector(instrument), StepCollector(steps)):
        snapshot = _Snapshot(collector)
        for family in collector.collect():
            for sample, kind in _instruments(family):
                create = meter.create_observable_gauge if kind == "gauge" else meter.create_observable_counter
                observe = partial(snapshot.observe, family.name, sample)
                create(sample.removesuffix("_total"), [observe], description=family.documentation)


def _instruments(family: Metric) -> list[tuple[str, str]]:
    """Return the samples of a family that become instruments, and their kinds."""
    if family.type == "histogram":
        return [(f"{family.name}_count", "counter"), (f"{family.name}_sum", "counter")]
    return [(f"{family.name}_total", "counter") if family.type == "counter" else (family.name, "gauge")]


class _Snapshot:
    """The families of a collector, read once for all callbacks of an export."""

    FRESH_S = 0.5

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._families: dict[str, Metric] = {}
        self._read_s = -self.FRESH_S

    def families(self) -> dict[str, Metric]:
        """Return the families by name, as they were at most half a second ago."""
        now_s = time.monotonic()
        if now_s - self._read_s >= self.FRESH_S:
            collected: Iterable[Metric] = self._collector.collect()
            self._families, self._read_s = {each.name: each for each in collected}, now_s
        return self._families

    def observe(self, family: str, sample: str, _: CallbackOptions) -> Iterator[Observation]:
        """Yield the samples of a name."""
        for each in self.families()[family].samples:
            if each.name == sample:
                yield metrics.Observation(each.value, each.labels)
