"""Operations as OpenTelemetry spans, for programs that send their traces to a collector.

The extra ``dist2[opentelemetry]`` has the API; the program configures the SDK and its exporter. A span
costs tens of microseconds, so that short operations are left out unless the caller says otherwise.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dist2.errors import BackendUnavailableError
from dist2.operation.signature import Operation
from dist2.runtime.deadline import seconds
from observability.flight_recorder import global_rank

try:
    from opentelemetry import trace
except ModuleNotFoundError as error:
    raise BackendUnavailableError(
        "spans need opentelemetry-api: pip install 'dist2[opentelemetry]'"
    ) from error

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup


class SpanInstrument:
    """An instrument that makes a span of each operation: give it to `dist2.add_instrument`.

    Spans are children of the span that is current where the operation ends: for synchronous operations that
    of the caller.

    Args:
        tracer_provider: Where spans go; the global one by default.
        least_s: Operations that take less have no span, unless they fail.

    Raises:
        BackendUnavailableError: On import, where the extra is not installed.
    """

    def __init__(
        self, tracer_provider: trace.TracerProvider | None = None, *, least_s: float = 0.001
    ) -> None:
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
        span = self._tracer.start_span(
            f"dist2.{signature.kind.value}",
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
