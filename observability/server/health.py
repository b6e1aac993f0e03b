"""How the groups of this process are, and why: ``ok``, ``degraded`` where an operation waits, ``failing``.

Readiness and liveness differ. A rank that waits, or is waited for, is not ready; but to restart it would only
destroy the evidence and the job. So `degraded` still answers 200 at ``/healthz``, 503 at ``/readyz``, and
``/livez`` answers 200 as long as the control plane runs.
"""

from __future__ import annotations

from enum import StrEnum
from time import monotonic_ns
from typing import Any

import attrs

from observability.job.member import Member
from observability.metrics import Metrics

GRACE_NS = 500_000_000
"""How long past its deadline an operation may still be ending."""


class Status(StrEnum):
    """How a process is."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILING = "failing"


@attrs.frozen
class Health:
    """A verdict.

    Attributes:
        reasons: The faults, in sentences; empty if there is none.
        waiting: The operations of this rank that wait, in sentences.
        waited_for: The operations of other ranks that wait for this one, in sentences.
    """

    reasons: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    waited_for: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """The worst of it."""
        if self.reasons:
            return Status.FAILING
        return Status.DEGRADED if self.waiting or self.waited_for else Status.OK

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.status is Status.OK

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "ok": self.ok,
            "status": self.status.value,
            "waited_for": bool(self.waited_for),
            "reasons": [*self.reasons, *self.waited_for, *self.waiting],
        }


def _waiting(member: Member) -> tuple[str, ...]:
    now_ns = monotonic_ns()
    waits = () if member.watch is None else member.watch.waits
    return tuple(wait.sentence(now_ns) for wait in waits)


def _waited_for(member: Member) -> tuple[str, ...]:
    now_ns, notices = monotonic_ns(), member.notices()
    stands = member.stands() if notices else ""
    return tuple(notice.sentence(stands, now_ns) for notice in notices)


def health_of(metrics: Metrics, now_ns: int | None = None, member: Member | None = None) -> Health:
    """Judge: no operation past its deadline, no group in use that an error made useless, and no waiting.

    A group that broke and was closed counts no more once another is open: the job has gone on.

    Args:
        metrics: The counters of this process.
        now_ns: Monotonic nanosecond to judge at; now by default.
        member: Has the operations that wait.
    """
    now_ns = monotonic_ns() if now_ns is None else now_ns
    reasons = []
    for operation in metrics.in_flight():
        late_ns = now_ns - operation.deadline_ns
        if late_ns > GRACE_NS:
            group = operation.signature.group.name
            reasons.append(f"{operation.describe()} on {group} is {late_ns / 1e9:.1f} s past its deadline")
    groups = metrics.statuses.groups()
    judged = [status for status in groups if status.is_open] or groups[:1]
    for status in judged:
        failure = status.broken_by
        if failure is not None:
            end = "is of no more use" if status.is_open else "was closed"
            reasons.append(
                f"{status.info.name} {end} after {failure.error} in {failure.call}: {failure.message}"
            )
    if member is None:
        return Health(tuple(reasons))
    return Health(tuple(reasons), _waiting(member), _waited_for(member))
