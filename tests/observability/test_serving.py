"""The server of a control plane: clients that connect while it stops."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import threading
import time
from typing import Any

import pytest
from support.captured_logs import logged
from support.time_limits import in_time

from dist2.errors import Dist2Error
from observability.server.serving import Serving

SOON_S = 20.0
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_a_request_that_is_cancelled_as_the_server_stops_is_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked = threading.Event()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = Serving(never, listener)
    try:
        with socket.create_connection(("127.0.0.1", port), SOON_S) as client, logged() as records:
            client.sendall(REQUEST)
            assert asked.wait(SOON_S)
            serving.stop()
    finally:
        serving.stop()
    assert (records, capfd.readouterr().err) == ([], "")


def test_a_server_that_cannot_start_says_why_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(asyncio, "Runner", refuse)
    start = time.monotonic()
    with pytest.raises(Dist2Error, match=r"did not start: .* Operation not permitted"):
        Serving(answer, listener)
    in_time(time.monotonic() - start, 2.0)
    assert listener.fileno() == -1


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_is_accepted_as_the_server_stops_is_not_left_waiting(turns: int) -> None:
    """It waited for its whole time limit, or for a garbage collection that closed its connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = Serving(answer, listener)
    loop = serving._server._loop
    assert loop is not None
    holds, connected = threading.Event(), threading.Event()

    def stop_after(left: int) -> None:
        if left == 0:
            serving._server._stop.set()  # type: ignore[union-attr]  # it runs
        else:
            loop.call_soon(stop_after, left - 1)

    def hold() -> None:
        holds.set()
        assert connected.wait(SOON_S)
        stop_after(turns)

    gc.disable()
    try:
        loop.call_soon_threadsafe(hold)
        assert holds.wait(SOON_S)
        with socket.create_connection(("127.0.0.1", port), SOON_S) as client:  # into the backlog
            client.sendall(REQUEST)
            connected.set()
            try:
                while client.recv(1 << 16):  # an answer, or none: then the end of the connection
                    pass
            except ConnectionResetError:
                pass
    finally:
        gc.enable()
        serving.stop()
