"""The answers of the control plane as plain data: groups, operations, failures, and the data of the page."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from typing import Any

import attrs

from dist2.group.open_groups import open_groups
from dist2.operation.record import Operation
from observability.exposition import dist2_version
from observability.flight_recorder import FlightRecorder, error_text, global_rank
from observability.group_status import Failure, GroupStatus
from observability.job.member import Member
from observability.metrics import Metrics, Series, size_in_words
from observability.server.health import Health, health_of

Document = dict[str, Any]

SHOWN_FAILURES = 10
SHOWN_IN_FLIGHT = 50


@attrs.frozen(eq=False)
class Source:
    """The sources of the answers.

    Attributes:
        metrics: Counts.
        recorder: Remembers.
        member: This rank's part in the job.
    """

    metrics: Metrics
    recorder: FlightRecorder
    member: Member

    def identity(self) -> Document:
        """Say which process of the job this is."""
        info = self.member.info()
        return {
            "rank": None if info is None else global_rank(info),
            "group": None if info is None else info.name,
            "group_rank": None if info is None else info.rank,
            "world_size": None if info is None else info.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": dist2_version(),
        }

    @property
    def rank(self) -> int | None:
        """The rank in the job of this process; None before there is a group."""
        info = self.member.info()
        return None if info is None else global_rank(info)

    def health(self) -> Health:
        """Judge this process."""
        return health_of(self.metrics, member=self.member)

    def groups(self) -> Document:
        """List the groups: open ones, then closed ones."""
        running = Counter(operation.signature.group for operation in self.metrics.in_flight())
        last_seq: Counter[str] = Counter()
        for series in self.metrics.series():
            if not series.key.is_p2p:
                last_seq[series.key.group] = max(last_seq[series.key.group], series.last_seq)
        now_ns = time.monotonic_ns()
        return {
            "groups": [
                {
                    **_group(status, now_ns),
                    "in_flight": running[status.info],
                    "last_seq": last_seq[self.metrics.label_of(status.info)],
                }
                for status in self.metrics.statuses.groups()
            ]
        }

    def works(self, group: str | None = None, limit: int = 100) -> Document:
        """List operations in flight and queued, oldest first, and ended operations, newest first.

        Args:
            group: Only of the group of this name.
            limit: Number of ended operations.
        """
        now_ns = time.monotonic_ns()
        in_flight = [each for each in self.metrics.in_flight() if _is_of(each, group)]
        ended = [each for each in self.recorder.operations() if each.finished_ns and _is_of(each, group)]
        ended.sort(key=lambda operation: operation.finished_ns, reverse=True)
        queued = [each for pg in open_groups() for each in pg.queued() if _is_of(each, group)]
        return {
            "in_flight": [_work(each, now_ns) for each in in_flight],
            "queued": [_queued(each, now_ns) for each in queued[:limit]],
            "finished": [_work(each, now_ns) for each in ended[:limit]],
        }

    def summary(self) -> Document:
        """Return all that the live page shows, read at one moment."""
        now_ns = time.monotonic_ns()
        in_flight = self.metrics.in_flight()
        return {
            "identity": self.identity(),
            "now_s": now_ns / 1e9,
            "health": self.health().document(),
            **self.groups(),
            "operations": [_series(series) for series in self.metrics.series()],
            "in_flight": [_work(operation, now_ns) for operation in in_flight[:SHOWN_IN_FLIGHT]],
            "in_flight_count": len(in_flight),
            "failures": [
                _failure(failure, now_ns) for failure in self.metrics.statuses.failures()[:SHOWN_FAILURES]
            ],
        }


def _is_of(operation: Operation, group: str | None) -> bool:
    return group is None or operation.signature.group.name == group


def _group(status: GroupStatus, now_ns: int) -> Document:
    info = status.info
    return {
        "name": info.name,
        "uid": info.uid,
        "desc": info.desc,
        "backend": info.backend,
        "rank": info.rank,
        "world_size": info.world_size,
        "global_ranks": list(info.global_ranks),
        "state": status.state,
        "open_for_s": ((status.closed_ns or now_ns) - status.opened_ns) / 1e9,
        "broken_by": None if status.broken_by is None else _failure(status.broken_by, now_ns),
    }


def _work(operation: Operation, now_ns: int) -> Document:
    signature = operation.signature
    where = "" if operation.code is None else f"{operation.code.co_filename}:{operation.line}"
    return {
        "group": signature.group.name,
        "op": signature.kind.value,
        "seq": operation.seq,
        "call": str(signature),
        "where": where,
        "bytes": signature.nbytes,
        "state": operation.state.value,
        "async": operation.is_async,
        "elapsed_s": ((operation.finished_ns or now_ns) - operation.created_ns) / 1e9,
        "queued_s": max(0, operation.started_ns - operation.created_ns) / 1e9,
        "timeout_s": operation.timeout_s,
        "overdue": not operation.finished_ns and now_ns > operation.deadline_ns,
        "error": error_text(operation) or None,
    }


def _queued(operation: Operation, now_ns: int) -> Document:
    """Return an operation that was issued and has not begun: others of its group are before it."""
    waited_s = (now_ns - operation.created_ns) / 1e9
    return {**_work(operation, now_ns), "state": "queued", "queued_s": waited_s}


def _series(series: Series) -> Document:
    return {
        "op": series.key.op,
        "group": series.key.group,
        "backend": series.key.backend,
        "size": size_in_words(series.key.size),
        "count": series.succeeded,
        "failed": series.failed,
        "bytes": series.nbytes,
        "total_s": series.total_ns / 1e9,
        "longest_s": series.longest_ns / 1e9,
        # [place, count]: that many took more than 2**(place-1) and at most 2**place nanoseconds
        "durations": [[place, count] for place, count in enumerate(series.durations) if count],
    }


def _failure(failure: Failure, now_ns: int) -> Document:
    return {
        "group": failure.group.name,
        "op": failure.op,
        "seq": failure.seq,
        "call": failure.call,
        "error": failure.error,
        "message": failure.message,
        "ago_s": max(0, now_ns - failure.at_ns) / 1e9,
        "group_usable": failure.group_usable,
    }
