"""The endpoints about the speed of the whole job: stragglers, traces, and where Prometheus finds the ranks.

They ask other ranks, which takes up to some seconds: so they run on threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from observability.client import fetch
from observability.clocks import clock_id
from observability.flight_recorder import FlightRecorder
from observability.job.member import Member
from observability.job.peers import FAILURES, Peers
from observability.optimizer_steps import optimizer_steps
from observability.server.answers import Endpoint, as_json, heavy_answer, number
from observability.server.threads import Heavy, on_thread
from observability.straggler_watch import StragglerCollector, StragglerWatch
from observability.tracing import encode, recent

MOST_SECONDS = 3600
TRACE_S = 60
MOST_SLICES = 1 << 20


class Performance:
    """The answer of each path, and the watch for stragglers.

    Args:
        recorder: Remembers the operations of this process.
        peers: The control planes of the job.

    Attributes:
        watch: Finds stragglers.
    """

    def __init__(self, recorder: FlightRecorder, peers: Peers) -> None:
        self._recorder = recorder
        self.peers = peers
        self.watch = StragglerWatch(peers.entries, self._watched)
        self._counts = False
        self._own = Heavy()
        self._of_all = Heavy()  # apart: it asks this rank too, for its own timeline

    def reading(self) -> dict[str, Endpoint]:
        """Return the answers to GET, by path."""
        return {
            "/clock": self.clock,
            "/timeline": self.timeline,
            "/stragglers": self.stragglers,
            "/trace": self.trace,
            "/sd": self.targets,
        }

    def show_in(self, registry: CollectorRegistry) -> None:
        """Add the cost of stragglers to the metrics."""
        registry.register(StragglerCollector(self.watch))

    def start(self) -> None:
        """Begin to watch: one rank watches all, the lowest that is known."""
        optimizer_steps.watch()
        self._counts = True
        self.watch.start()

    def stop(self) -> None:
        """End the watch. Idempotent."""
        if self._counts:
            optimizer_steps.ignore()
        self._counts = False
        self.watch.stop()

    def is_watching(self) -> bool:
        """Whether it is this rank that watches all."""
        return self.peers.rank == min(self.peers.ranks(), default=-1)

    def _watched(self) -> list[int]:
        """Return the ranks to watch: all, or none, if another rank does."""
        ranks = self.peers.ranks()
        return ranks if len(ranks) > 1 and self.is_watching() else []

    async def clock(self, request: Request) -> Response:
        """The monotonic clock of this process."""
        return as_json({"now_ns": monotonic_ns(), "clock": clock_id()})

    async def timeline(self, request: Request) -> Response:
        """The operations of this rank in the last ``?ms=``; the last ``?most=`` of them."""
        limit_s = number(request, "ms", TRACE_S * 1000, MOST_SECONDS * 1000) / 1000
        most = number(request, "most", MOST_SLICES, MOST_SLICES)
        return await heavy_answer(request, self._own, self._timeline, limit_s, most)

    def _timeline(self, limit_s: float, most: int) -> bytes:
        return json.dumps(recent(self._recorder, self.peers.rank, limit_s, most).document()).encode()

    async def stragglers(self, request: Request) -> Response:
        """The ranks that arrive late, as known to the rank that watches, or else as found by this one."""
        return as_json(await on_thread(self._stragglers))

    async def trace(self, request: Request) -> Response:
        """One timeline for Perfetto: the last ``?seconds=`` of all ranks, or of ``?rank=`` alone.

        Without ``?seconds=`` all that this process remembers, of ``?rank=`` or of its own.
        """
        wanted = number(request, "rank", 0, 1 << 31) if "rank" in request.query_params else None
        name = "trace.json" if wanted is None else f"trace_rank{wanted}.json"
        if "seconds" in request.query_params:
            seconds = number(request, "seconds", TRACE_S, MOST_SECONDS)
            return await heavy_answer(request, self._of_all, self._trace, seconds, wanted, name=name)
        rank = self.peers.rank if wanted is None else wanted
        name = f"trace_rank{rank}.json"
        return await heavy_answer(request, self._own, self._recorded, rank, name=name)

    def _trace(self, seconds: int, wanted: int | None) -> bytes:
        return json.dumps(self.peers.trace(seconds, None if wanted is None else [wanted])).encode()

    def _recorded(self, rank: int) -> bytes:
        return encode(self._recorder.recording(rank))

    async def targets(self, request: Request) -> Response:
        """The control planes of all ranks, for ``http_sd_configs`` and ``file_sd_configs`` of Prometheus."""
        return as_json(await on_thread(self.peers.targets))

    def _stragglers(self) -> dict[str, Any]:
        self.peers.find()
        ranks = self.peers.ranks()
        for rank in ranks:
            if rank >= self.peers.rank:
                break
            try:
                answer: dict[str, Any] = json.loads(self.peers.ask(rank, "/stragglers"))
            except FAILURES:
                continue  # the next one watches now
            return answer
        if self.is_watching():
            self.watch.look()
            return {**self.watch.document(), "asked_rank": self.peers.rank}
        watch = StragglerWatch(self.peers.entries, self.peers.ranks)
        watch.look()
        return {**watch.document(), "asked_rank": self.peers.rank}


def performance_of(
    recorder: FlightRecorder, member: Member, url: str, ask: Callable[..., bytes] = fetch
) -> Performance:
    """Return the answers of a rank.

    Args:
        recorder: Remembers the operations of this process.
        member: Its part in the job.
        url: Its own control plane.
        ask: Sends requests.
    """
    return Performance(recorder, Peers(member, url, ask))
