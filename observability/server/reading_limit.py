"""`ReadingLimit`: bounds how often, and how many at once, a client may read; beyond, it gets 429.

A dump or a trace takes the interpreter for up to 0.1 s, and the answers about the whole job ask all ranks. A
client in a loop without a pause would slow the training down. The limit is far above the rate of pages, of
``dist2 top`` and of ranks that ask each other, also if all share one address. Prometheus, probes and pages
themselves are not counted. Each client has a leaky bucket: a request adds its units, and units drain at the
permitted rate.

Acts have a limit of their own (`observability.server.acts`). The limit comes after the check of the token:
clients are few, and each is trusted, but perhaps careless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING

import attrs

from observability.server.answers import as_json

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

UNITS_A_SECOND = 100.0
BURST_UNITS = 200.0
HEAVY = frozenset({"/flight_recorder", "/trace", "/timeline", "/stacks", "/desync"})
HANDLERS = "/handler/"
"""In the paths of handlers, to which requests are POST though they read: they are heavy, too."""
HEAVY_UNITS = 5.0
"""Units of a request for one of these; others take one unit."""
AT_ONCE = 32
"""Requests of one client that are answered at the same time."""
CLIENTS = 1024

UNLIMITED = frozenset({"/metrics", "/healthz", "/livez", "/readyz", "/events"})
"""Scrapes and probes; and a stream that stays open, which is one request."""


@attrs.define
class _Client:
    """The use of one client.

    Attributes:
        units: The content of its bucket, at `at`.
        at: The time of its last request, in seconds.
        running: Number of its requests that are being answered.
    """

    units: float = 0.0
    at: float = 0.0
    running: int = 0

    def drain(self, now: float) -> None:
        """Take out the units that have drained."""
        self.units = max(0.0, self.units - (now - self.at) * UNITS_A_SECOND)
        self.at = now


class ReadingLimit:
    """An ASGI middleware that bounds the requests of each address that read.

    Args:
        app: Answers the requests within the limit.
        pages: Paths that are not counted, beside `UNLIMITED`.
        clock: Returns seconds.
    """

    def __init__(
        self, app: ASGIApp, pages: Collection[str] = (), clock: Callable[[], float] = monotonic
    ) -> None:
        self._app = app
        self._free = UNLIMITED.union(pages)
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, is_http = scope.get("path", ""), scope["type"] == "http"
        is_handler = HANDLERS in path
        is_counted = is_http and (scope["method"] in ("GET", "HEAD") or is_handler)
        if not is_counted or path in self._free:
            await self._app(scope, receive, send)
            return
        client = self._client_of(scope)
        wait_s = self._wait_s(client, HEAVY_UNITS if path in HEAVY or is_handler else 1.0)
        if wait_s:
            headers = {"Retry-After": str(math.ceil(wait_s))}
            reason = f"this client reads too often: {UNITS_A_SECOND:.0f} requests a second, {AT_ONCE} at once"
            status = HTTPStatus.TOO_MANY_REQUESTS
            refusal = as_json({"error": status.name.lower(), "reason": reason}, status, headers)
            await refusal(scope, receive, send)
            return
        client.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            client.running -= 1

    def _wait_s(self, client: _Client, units: float) -> float:
        """Take the units of a request; return 0, or the time after which it may be repeated."""
        client.drain(self._clock())
        wait_s = max(0.0, client.units + units - BURST_UNITS) / UNITS_A_SECOND
        if client.running >= AT_ONCE:
            return max(wait_s, 1.0)
        if not wait_s:
            client.units += units
        return wait_s

    def _client_of(self, scope: Scope) -> _Client:
        """Return the client of a request; idle clients are forgotten if there are many."""
        address = scope.get("client")
        name = "a Unix socket" if address is None else str(address[0])
        if name not in self._clients and len(self._clients) >= CLIENTS:
            now = self._clock()
            for each in self._clients.values():
                each.drain(now)
            self._clients = {key: each for key, each in self._clients.items() if each.running or each.units}
        return self._clients.setdefault(name, _Client())
