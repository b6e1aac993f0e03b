"""uvicorn in a daemon thread that has no timer: it wakes when somebody connects, or to stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING

import uvicorn

from dist2.errors import Dist2Error

if TYPE_CHECKING:
    from starlette.types import ASGIApp

START_S = 10.0
STOP_S = 5.0


class _QuietServer(uvicorn.Server):
    """A uvicorn server without its tick of ten times a second.

    The tick renews a Date header, which we do not send, and looks at limits, which we do not set.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        assert self._stop is not None
        await self._stop.wait()

    def stop(self) -> None:
        """End the main loop, from any thread."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)


class Serving:
    """The thread that answers requests.

    Args:
        app: What answers.
        listener: The socket to accept from; closed when the thread ends.

    Raises:
        Dist2Error: The server did not come up.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=256,
            timeout_graceful_shutdown=1,
        )
        self._server = _QuietServer(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="dist2-control-plane", daemon=True)
        self._thread.start()
        if not self._server.ready.wait(START_S):
            raise Dist2Error(f"the control plane did not come up within {START_S} s")

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
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        finally:
            self._listener.close()
