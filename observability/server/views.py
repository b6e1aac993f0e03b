"""The endpoints of the live page: one process, its last hour, and the job as a stream.

A page is open at one rank and shows any: with ``?rank=`` the answer is that of the control plane of that
rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from observability.job.peers import FAILURES, Peers
from observability.server.answers import Endpoint, as_json, number
from observability.server.documents import Source
from observability.server.events import Events
from observability.server.history import History
from observability.server.threads import on_thread


class Views:
    """The answers of each path.

    Args:
        source: This process.
        history: Its last hour.
        peers: The control planes of the job.
    """

    def __init__(self, source: Source, history: History, peers: Peers) -> None:
        self._source = source
        self._history = history
        self._peers = peers
        self._events = Events(source.member.job, source.summary)

    def reading(self) -> dict[str, Endpoint]:
        """Return the answers to GET, by path."""
        return {"/summary": self.summary, "/history": self.history, "/events": self._events.events}

    async def summary(self, request: Request) -> Response:
        """All that the live page shows of one process: this one, or that of ``?rank=``."""
        return await self._answer(request, "/summary", self._source.summary)

    async def history(self, request: Request) -> Response:
        """The last hour of this process, or of ``?rank=``: a point each 5 s, in columns by operation."""
        return await self._answer(request, "/history", self._history.document)

    async def _answer(self, request: Request, path: str, own: Callable[[], dict[str, Any]]) -> Response:
        rank = number(request, "rank", self._peers.rank, 1 << 31)
        if rank == self._peers.rank:
            return as_json(own())
        if rank not in self._source.member.world():
            raise HTTPException(404, f"no rank {rank} in this job")
        try:
            answer = await on_thread(self._peers.ask, rank, path)
            return as_json(json.loads(answer))
        except FAILURES as error:
            raise HTTPException(
                502, f"rank {rank} does not answer: {type(error).__name__}: {error}"
            ) from error
