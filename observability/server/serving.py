"""uvicorn in a daemon thread that wakes when a client connects, to stop, and every few seconds for its tick.

Streams end with the server: the event ``ending`` in the state of each request is set before the server waits
for its connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dist2.errors import Dist2Error
from dist2.security.refusals import refusals
from observability.access import peer_name

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger("dist2.control_plane")

START_S = 10.0
STOP_S = 5.0
REQUEST_S = 10.0
"""How long a TLS handshake may take, and a request from when its client connects or begins it."""
ACCEPT_TURNS = 3
"""Turns of the loop until a client that was accepted is a connection."""
MAX_WAITING = 128
"""Clients whose request is not there yet; for one more, the one that has been silent longest is closed."""
MAX_CLIENTS = 256
MAX_HEAD = 64 << 10
"""Bytes of the first line and the headers of a request, which the parser does not limit."""


class _Joining:
    """A transport that sends the head of an answer with the first part of its body.

    In a packet of its own, it wakes the client for nothing.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head or not data.endswith(b"\r\n\r\n"):
            data, self._head = self._head + data, b""
            self._transport.write(data)
        else:
            self._head = data
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """A client's connection, which is closed if no whole request arrives in time.

    Its parser is in C: uvicorn's other one takes as long for a request of a rank as all the rest of it.
    """

    _overdue: asyncio.TimerHandle | None = None
    _has_spoken = False
    _head_bytes = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # uvicorn's own option would silence other servers of the process too.
        self.access_log = False

    @property
    def since(self) -> float | None:
        """When the request was begun that is still waited for; None while none is."""
        return None if self._overdue is None else self._overdue.when()

    # A protocol of streams gets transports of streams, which asyncio's base class does not say.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # the type that asyncio passes
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, _Joining(transport, self.loop))
        self._await_request()
        waiting = [
            each for each in self.connections if isinstance(each, Connection) and each.since is not None
        ]
        if len(waiting) > MAX_WAITING:
            min(waiting, key=lambda each: each.since or 0.0).turn_away(
                "crowded", "too many others say nothing, either"
            )

    def data_received(self, data: bytes) -> None:
        self._has_spoken = True
        super().data_received(data)
        cycle = self.cycle  # of the request whose head came last; None before
        in_head = cycle is None or cycle.response_complete
        self._head_bytes = self._head_bytes + len(data) if in_head else 0
        if self._head_bytes > MAX_HEAD:
            self.turn_away("long", f"a head of more than {MAX_HEAD} bytes")
        elif in_head or cycle.more_body:
            self._await_request()
        else:
            self._await_nothing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_nothing()
        super().connection_lost(exc)

    def turn_away(self, reason: str, why: str) -> None:
        """Close it, for it has sent no request.

        One that has not sent a byte is no event: browsers connect in advance.
        """
        self._await_nothing()
        if self._has_spoken or reason != "silent":
            refusals.note("control", reason, peer_name(self.client), why)
        self.transport.abort()

    def _await_request(self) -> None:
        if self._overdue is None:
            why = f"no request within {REQUEST_S} s"
            self._overdue = self.loop.call_later(REQUEST_S, self.turn_away, "silent", why)

    def _await_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


class _QuietServer(uvicorn.Server):
    """A uvicorn server with a slower tick than its own of ten times a second.

    uvicorn's tick renews a Date header, which we do not send, and looks at limits, which we do not set.
    """

    def __init__(self, config: uvicorn.Config, tick: Callable[[], None] | None, tick_s: float) -> None:
        super().__init__(config)
        self._tick = tick
        self._tick_s = None if tick is None else tick_s
        self.ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn does, but with a shorter limit for TLS handshakes than asyncio's 60 s."""
        loop, config = asyncio.get_running_loop(), self.config
        self._stop, self._loop = asyncio.Event(), loop

        state = {"ending": self._stop}

        def connection() -> Connection:
            return Connection(config=config, server_state=self.server_state, app_state=state)

        tls, limit_s = config.ssl, None if config.ssl is None else REQUEST_S
        self.servers = [
            await loop.create_server(
                connection, sock=sock, backlog=config.backlog, ssl=tls, ssl_handshake_timeout=limit_s
            )
            for sock in sockets or ()
        ]
        self.started = True
        self.ready.set()

    async def main_loop(self) -> None:
        assert self._stop is not None
        while not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), self._tick_s)
            except TimeoutError:
                self._take_tick()

    def _take_tick(self) -> None:
        assert self._tick is not None
        try:
            self._tick()
        except Exception:  # the server must outlive it
            log.exception("the tick of the control plane failed; it goes on")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections, those included whose request was cancelled because it took too long.

        asyncio forgets a client that it has accepted if the server is closed before that is a connection:
        nobody closes its socket then, and the client waits for its answer. So accept no more first.
        """
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # asyncio closes the sockets in its next turn

    @property
    def stops(self) -> bool:
        """Whether the main loop has ended, or ends."""
        return self._stop is not None and self._stop.is_set()

    def stop(self) -> None:
        """End the main loop, from any thread."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)


class _TroublesOnly(logging.Filter):
    """Drops what one thread logs below WARNING, that it starts and stops, and once it stops.

    It then cancels requests that take long, with a traceback for each. Not the level of uvicorn's logger,
    which other servers of the process use too.
    """

    def __init__(self, thread_id: int, server: _QuietServer) -> None:
        super().__init__()
        self._thread_id = thread_id
        self._server = server

    def filter(self, record: logging.LogRecord) -> bool:
        is_trouble = record.levelno >= logging.WARNING and not self._server.stops
        return record.thread != self._thread_id or is_trouble


class Serving:
    """The thread that answers requests.

    Args:
        app: Answers the requests.
        listener: The socket to accept from; closed when the thread ends.
        tls: How to encrypt; None for plain HTTP.
        tick: Called every ``tick_s`` seconds by the thread.

    Attributes:
        encrypted: Whether clients must speak TLS.

    Raises:
        Dist2Error: The server did not start.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        tick: Callable[[], None] | None = None,
        tick_s: float = 5.0,
    ) -> None:
        self.encrypted = tls is not None
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CLIENTS,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = tls
        self._server = _QuietServer(config, tick, tick_s)
        self._listener = listener
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="dist2-control-plane", daemon=True)
        self._thread.start()
        if not self._server.ready.wait(START_S):
            raise Dist2Error(f"the control plane did not start within {START_S} s")
        if self._error is not None:
            raise Dist2Error(f"the control plane did not start: {self._error}") from self._error

    @property
    def thread_id(self) -> int:
        """The kernel's id of the thread."""
        return self._thread.native_id or 0

    def is_alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread. Idempotent.

        Raises:
            Dist2Error: It did not end in time.
        """
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise Dist2Error(f"the control plane did not stop within {STOP_S} s")

    def _run(self) -> None:
        of_uvicorn = logging.getLogger("uvicorn.error")
        troubles = _TroublesOnly(threading.get_ident(), self._server)
        of_uvicorn.addFilter(troubles)
        try:
            with asyncio.Runner() as runner:
                runner.run(self._server.serve(sockets=[self._listener]))
        except Exception as error:
            if self._server.started:
                raise
            self._error = error
            self._server.ready.set()
        finally:
            of_uvicorn.removeFilter(troubles)
            self._listener.close()
