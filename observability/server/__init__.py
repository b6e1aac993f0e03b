"""The HTTP control plane of a process: metrics, health, groups, operations, dumps and a live page.

It runs in a thread of its own that sleeps until somebody asks. Starlette and uvicorn are imported when
it is started, and come with the extra ``dist2[control-plane]``.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING

from dist2.errors import ArgumentTypeError, BackendUnavailableError, InvalidUsageError
from dist2.operation.instruments import dispatch
from dist2.operation.signature import GroupInfo
from dist2.runtime.config import Config
from dist2.security.entrance import Credentials
from observability.access import NEEDS_TLS, is_loopback, job_token
from observability.flight_recorder import instrument as recorder
from observability.metrics import instrument as metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from dist2.group.process_group import ProcessGroup
    from observability.server.serving import Serving


class Server:
    """A running control plane; a context manager that closes it.

    Attributes:
        url: Where it listens: ``http://127.0.0.1:40123``.
        token: What a client must send: ``Authorization: Bearer <token>``.
    """

    def __init__(self, listener: socket.socket, serving: Serving, host: str, token: str) -> None:
        port = listener.getsockname()[1]
        scheme = "https" if serving.encrypted else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self.token = token
        self._listener = listener
        self._serving = serving
        _running.add(self)

    @property
    def page_url(self) -> str:
        """The live page with the token: what to open in a browser. Keep it to yourself."""
        return f"{self.url}/?token={self.token}"

    @property
    def closed(self) -> bool:
        """Whether it has stopped."""
        return not self._serving.is_alive()

    def close(self) -> None:
        """Stop listening, close its connections and end its thread. Idempotent."""
        _running.discard(self)
        self._serving.stop()

    def close_inherited(self) -> None:
        """Let go of the listening socket in a forked child, or the port outlives this process."""
        self._listener.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {self.url}{' closed' if self.closed else ''}>"


_running: weakref.WeakSet[Server] = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    """Have forked children let go of our sockets; once a process, as it cannot be undone."""
    os.register_at_fork(after_in_child=_forked)


def start(
    pg: ProcessGroup | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
) -> Server:
    """Start the control plane of this process.

    Every rank may start one; it shows all groups of its process. It answers only requests
    that bear the token.

    Args:
        pg: The group whose rank names this process; by default the first that is open.
        host: Address to listen on. Anything but loopback needs TLS: ``DIST2_TLS_CERT``, ``DIST2_TLS_KEY`` and
            ``DIST2_TLS_CA``.
        port: 0 takes a free one.
        token: What requests must bear. By default it is derived from ``DIST2_SECRET`` and ``DIST2_JOB_ID``,
            and so is the same on all ranks of a job; random where no secret is set.

    Returns:
        The running server; `Server.close` stops it.

    Raises:
        BackendUnavailableError: Starlette or uvicorn is not installed.
        InvalidUsageError: The address cannot be listened on or needs TLS, or the token, the secret or a
            certificate is unusable.
    """
    app_of, serving_type = _implementation()
    credentials = Credentials.of(Config.from_environment())
    tls = credentials.tls
    if token is None:
        token = job_token(credentials) or secrets.token_urlsafe(24)
    _check(token)
    _load_instruments(pg)
    listener = _listen(host, port, tls is not None)
    try:
        port = listener.getsockname()[1]
        app = app_of(
            metrics,
            recorder,
            token=token,
            port=port,
            info=None if pg is None else pg.info,
        )
        serving = serving_type(app, listener, None if tls is None else tls.web_context())
    except BaseException:
        listener.close()
        raise
    _watch_forks()
    return Server(listener, serving, host, token)


def _implementation() -> tuple[Callable[..., ASGIApp], type[Serving]]:
    """Import what needs the extra."""
    try:
        from observability.server.app import app_of
        from observability.server.serving import Serving
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise BackendUnavailableError(
            f"the control plane needs {error.name}: pip install 'dist2[control-plane]'"
        ) from error
    return app_of, Serving


def _check(token: str) -> None:
    if not isinstance(token, str):
        raise InvalidUsageError(f"token must be a str, got {type(token).__name__}")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidUsageError("token must be printable ASCII without spaces, and not empty")


def _load_instruments(pg: ProcessGroup | None) -> None:
    """See that what the control plane shows is recorded, also where it was switched off or not installed."""
    if pg is not None and not isinstance(getattr(pg, "info", None), GroupInfo):
        raise InvalidUsageError(f"pg must be a dist2 process group or None, got {pg!r} ({type(pg).__name__})")
    dispatch.load_defaults()
    for instrument in (recorder, metrics):
        if instrument not in dispatch.instruments:
            dispatch.add(instrument)
        if pg is not None:
            instrument.group_opened(pg)


def _listen(host: str, port: int, encrypted: bool) -> socket.socket:
    if not isinstance(host, str):
        raise ArgumentTypeError(f"host must be a str, got {host!r} ({type(host).__name__})")
    if not host:
        raise InvalidUsageError("host must not be empty: that would listen on every address")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
        raise InvalidUsageError(f"port must be from 0 to 65535, got port={port!r}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidUsageError(f"cannot listen on host={host!r}, port={port}: {error}") from error
    if not encrypted and not is_loopback(listener.getsockname()[0]):
        listener.close()  # before anything was answered
        raise InvalidUsageError(f"other machines can reach host={host!r}: {NEEDS_TLS}")
    return listener


def _forked() -> None:
    for server in list(_running):
        server.close_inherited()
    _running.clear()
