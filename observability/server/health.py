"""Whether the groups of this process are well, and if not, why."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

import attrs

from observability.metrics import Metrics

GRACE_NS = 500_000_000
"""How long past its deadline an operation may still be ending."""


@attrs.frozen
class Health:
    """A verdict.

    Attributes:
        reasons: What is wrong, in sentences; empty where nothing is.
    """

    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.reasons

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"ok": self.ok, "reasons": list(self.reasons)}


def health_of(metrics: Metrics, now_ns: int | None = None) -> Health:
    """Judge: no operation past its deadline, and no group in use that an error made useless.

    A group that broke and was closed counts no more once another is open: the job has gone on.

    Args:
        metrics: What counts the operations of this process.
        now_ns: Monotonic nanosecond to judge at; now by default.
    """
    now_ns = monotonic_ns() if now_ns is None else now_ns
    reasons = []
    for operation in metrics.in_flight():
        late_ns = now_ns - operation.deadline_ns
        if late_ns > GRACE_NS:
            group = operation.signature.group.name
            reasons.append(f"{operation.describe()} on {group} is {late_ns / 1e9:.1f} s past its deadline")
    groups = metrics.board.groups()
    judged = [status for status in groups if status.is_open] or groups[:1]
    for status in judged:
        failure = status.broken_by
        if failure is not None:
            end = "is of no more use" if status.is_open else "was closed"
            reasons.append(
                f"{status.info.name} {end} after {failure.error} in {failure.call}: {failure.message}"
            )
    return Health(tuple(reasons))
