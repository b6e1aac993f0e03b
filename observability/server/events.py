"""The state of the job as server-sent events, once a second while a client listens, and its log of waits.

Theory of operation. Each listener has a coroutine that asks the ranks on a thread of the pool, sends the
answer and waits. Listeners that ask at the same time get one answer (`Member.job`). A large job is asked less
often: the pause is at least `REST` times the time of the last answer. The stop of the server sets an event
that ends every stream at once.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from observability.job.documents import MAX_EVENTS
from observability.server.threads import on_thread

EVERY_S = 1.0
REST = 4.0
"""The pause between two answers is at least so many times the time of an answer."""

MAX_LISTENERS = 16
TOLD = 8 * MAX_EVENTS
"""Lines that are not sent again: those of a rank that was silent for a while come again."""

Read = Callable[[], dict[str, Any]]


class Events:
    """The endpoint `/events`.

    Args:
        job: Returns the state of the job; called on a thread.
        summary: Returns the state of this process; None while there is none.
    """

    def __init__(self, job: Read, summary: Callable[[], dict[str, Any] | None]) -> None:
        self._job = job
        self._summary = summary
        self._listeners = 0

    async def events(self, request: Request) -> Response:
        """Server-sent events: ``summary`` and ``job`` once a second, ``log`` for each wait of the job."""
        if self._listeners >= MAX_LISTENERS:
            raise HTTPException(503, f"{MAX_LISTENERS} clients listen already: poll /job instead")
        ending: asyncio.Event = request.scope["state"]["ending"]
        self._listeners += 1  # before the first await: others may ask meanwhile
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return _Stream(self._stream(ending), self._left, headers)

    def _left(self) -> None:
        self._listeners -= 1

    async def _stream(self, ending: asyncio.Event) -> AsyncIterator[str]:
        loop, stop = asyncio.get_running_loop(), asyncio.ensure_future(ending.wait())
        told: deque[str] = deque(maxlen=TOLD)
        try:
            while not stop.done():
                summary = self._summary()
                if summary is not None:
                    yield _event("summary", summary)
                began = loop.time()
                asked = on_thread(self._job)
                both: tuple[asyncio.Future[Any], ...] = (asked, stop)
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    asked.cancel()
                    return
                job = asked.result()
                yield _event("job", job)
                for line in job.get("events", []):
                    text = _event("log", line)
                    if text not in told:
                        told.append(text)
                        yield text
                pause_s = max(EVERY_S, REST * (loop.time() - began))
                await asyncio.wait({stop}, timeout=pause_s)
        finally:
            stop.cancel()


class _Stream(StreamingResponse):
    """A stream that says when it has ended, also where the client left before its first event."""

    media_type = "text/event-stream"

    def __init__(
        self, content: AsyncIterator[str], left: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(content, headers=headers)
        self._left = left

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


def _event(name: str, document: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(document, allow_nan=False)}\n\n"
