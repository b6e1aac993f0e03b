"""The description of one rank by itself: plain data, as it goes from one control plane to another."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import attrs

from dist2.group.open_groups import open_groups
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.other_process import Process
from observability.exposition import bus_share, dist2_version
from observability.flight_recorder import FlightRecorder, error_text, global_rank
from observability.group_status import GroupStatus
from observability.job.answer import State
from observability.job.messages import counts_of
from observability.job.rank_text import rank_text
from observability.job.stacks import awaited_of, position
from observability.job.workers import AFTER_S, Workers
from observability.metrics import Metrics
from observability.steps import steps

PROTOCOL = 6
"""Of the data below: control planes of another number say so, and are not read."""

MAX_IN_FLIGHT = 64
MAX_GROUPS = 64
MAX_FAILURES = 3
WAIT_IN_CPP = frozenset({"torch.autograd", "torch.distributed", "torch.futures"})
"""Packages of torch that wait for operations in C++, where no frame shows it."""
LATEST_STEPS = 4
"""Steps of a loop that are sent: ranks may be some steps apart."""
HISTORY = 64
"""Number of collectives of each group that are sent to the rank that compares all."""


@attrs.define
class _Stay:
    """How long a thing has been the same, as far as looks at it can tell."""

    _seen: object = None
    _since: float = 0.0

    def time_s(self, seen: object) -> float:
        """Return for how long it has been what is seen now."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


@attrs.frozen(eq=False)
class Witness:
    """Describes a rank.

    Attributes:
        metrics: Knows the operations in flight.
        recorder: Knows the last operations.
        thread_id: Of the thread that plays the rank: the one that started the control plane.
        info: The group whose rank names the process; None takes the first that is open.
        process: This process.
    """

    metrics: Metrics
    recorder: FlightRecorder
    thread_id: int
    info: Callable[[], GroupInfo | None]
    process: Process
    _stay: _Stay = attrs.field(factory=_Stay, init=False)
    _workers: Workers = attrs.field(factory=Workers, init=False)

    def in_flight(self) -> list[Operation]:
        """Return the operations of this rank that have begun and not ended, oldest first."""
        info = self.info()
        rank = None if info is None else global_rank(info)
        return [
            each
            for each in self.metrics.in_flight()
            if rank is None or global_rank(each.signature.group) == rank
        ]

    def position(self) -> dict[str, Any]:
        """Return where the thread that plays this rank stands."""
        return position(self.thread_id)

    def look(self) -> dict[str, Any]:
        """Return the position with ``for_s``: for how long nothing has changed, as far as looks can tell."""
        main = self.position()
        begun = tuple(each._get_sequence_number_for_group() for each in open_groups())
        seen = (main["inside"], main["place"], begun, len(self.metrics.statuses.groups()))
        return {**main, "for_s": self._stay.time_s(seen)}

    def state(self, history: int = 1) -> State:
        """Describe this rank now.

        Args:
            history: How many collectives of each group to tell, the last ones.
        """
        info, now_ns = self.info(), time.monotonic_ns()
        rank = None if info is None else global_rank(info)
        statuses = [
            each for each in self.metrics.statuses.groups() if rank is None or global_rank(each.info) == rank
        ]
        in_flight, main = self.in_flight(), self.look()
        if main["for_s"] >= AFTER_S and not in_flight:
            main["workers"] = self._workers.told(self.thread_id)
        awaited = awaited_of(in_flight) if any(each.is_async for each in in_flight) else set()
        idle = {each for each in in_flight if is_idle(each, awaited, main)}
        told = _told(in_flight, idle)
        busy = {each.signature.group for each in told}
        groups = _groups(statuses, busy, self.recorder, history, now_ns)
        failures = [each for each in self.metrics.statuses.failures() if global_rank(each.group) == rank]
        return {
            "protocol": PROTOCOL,
            "version": dist2_version(),
            "rank": rank,
            "world_size": None if info is None else info.world_size,
            "job_is_open": info is None or info in self.metrics.statuses.open_groups(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": self.process.text,
            "epoch_ns": time.time_ns(),
            "main": main,
            "groups": groups,
            "groups_left_out": max(0, sum(each.is_open for each in statuses) - MAX_GROUPS),
            "steps": [each.document(LATEST_STEPS) for each in steps.loops() if rank in (None, each.rank)][:4],
            "in_flight": [{**operation_state(each, now_ns), "idle": each in idle} for each in told],
            "in_flight_count": len(in_flight),
            "failures": [
                {"group": each.group.name, "call": each.call, "error": each.error, "message": each.message}
                for each in failures[:MAX_FAILURES]
            ],
        }

    def traffic(self) -> dict[str, State]:
        """Return the totals of this rank's operations by the uid of the group.

        Groups of one name have one count, as in the metrics.
        """
        info = self.info()
        rank = None if info is None else global_rank(info)
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for series in self.metrics.series():
            key, total = series.key, totals[series.key.group]
            if rank is None or key.rank == rank:
                total["operations"] += series.succeeded + series.failed
                total["bytes"] += series.nbytes
                total["bus_bytes"] += round(series.nbytes * bus_share(key.op, key.world_size))
        groups = [each.info for each in self.metrics.statuses.groups()]
        counted = ("operations", "bytes", "bus_bytes")
        return {
            info.uid: {name: totals[self.metrics.label_of(info)][name] for name in counted} for info in groups
        }


def is_idle(operation: Operation, awaited: Collection[Operation], main: State) -> bool:
    """Whether no thread waits for an operation, as far as that can be seen: torch may wait in C++."""
    return operation.is_async and operation not in awaited and main["library"] not in WAIT_IN_CPP


def _told(in_flight: list[Operation], idle: Collection[Operation]) -> list[Operation]:
    """Return the operations to tell, oldest first: those that a thread waits for, collectives, the oldest."""
    chosen = sorted(in_flight, key=lambda each: (each in idle, each.signature.kind.is_p2p))[:MAX_IN_FLIGHT]
    return sorted(chosen, key=lambda each: each.created_ns)


def _groups(
    statuses: list[GroupStatus],
    busy: Collection[GroupInfo],
    recorder: FlightRecorder,
    history: int,
    now_ns: int,
) -> dict[str, State]:
    """Return the progress of each group by its uid; an open group hides closed ones of its uid.

    Args:
        statuses: Of the groups: open ones first. Of very many those are told that are open, have an operation
            in flight, or were used last.
        busy: Those with an operation in flight.
        recorder: Remembers.
        history: How many collectives of each group to tell.
        now_ns: Monotonic nanosecond of the answer.
    """
    recent: dict[GroupInfo, list[Operation]] = {status.info: [] for status in statuses}
    used: dict[GroupInfo, int] = {}
    delivered = recorder.delivered()
    for operation in reversed(recorder.operations()):
        used.setdefault(operation.signature.group, len(used))
        of_group = recent.get(operation.signature.group)
        if of_group is not None and len(of_group) < history and not operation.signature.kind.is_p2p:
            of_group.append(operation)
    issued = {each.info: each._get_sequence_number_for_group() for each in open_groups()}
    found: dict[str, State] = {}

    def importance(status: GroupStatus) -> tuple[bool, bool, int]:
        return status.is_open, status.info in busy, -used.get(status.info, len(used))

    chosen = set(sorted(statuses, key=importance, reverse=True)[:MAX_GROUPS])
    for status in statuses:
        info = status.info
        if status not in chosen:
            continue
        last = recent[info]
        begun = max([issued.get(info, 0), *[each.seq for each in last[:1]]])
        if info.uid not in found:
            found[info.uid] = {
                "name": info.name,
                "backend": info.backend,
                "rank": info.rank,
                "ranks": rank_text(info.global_ranks),
                "state": status.state,
                "begun": begun,
                "messages": counts_of(info, delivered),
                "recent": [operation_state(each, now_ns) for each in last],
            }
    return found


def operation_state(operation: Operation, now_ns: int) -> State:
    """Describe an operation; its peer by its rank in the job."""
    signature = operation.signature
    peer = signature.peer
    return {
        "uid": signature.group.uid,
        "group": signature.group.name,
        "op": signature.kind.value,
        "seq": operation.seq,
        "p2p": signature.kind.is_p2p,
        "call": str(signature),
        "where": where_of(operation),
        "path": "" if operation.code is None else f"{operation.code.co_filename}:{operation.line}",
        "state": operation.state.value,
        "timeout_s": operation.timeout_s,
        "age_s": max(0, (operation.finished_ns or now_ns) - operation.created_ns) / 1e9,
        "peer": None if peer is None else signature.group.global_ranks[peer],
        "tag": signature.tag,
        "fingerprint": f"{signature.fingerprint:016x}",
        "error": error_text(operation) or None,
    }


def where_of(operation: Operation) -> str:
    """Return the line in user code that called: ``job.py:18``; empty where it is not known."""
    return "" if operation.code is None else f"{Path(operation.code.co_filename).name}:{operation.line}"
