"""The HTTP control plane of a process: metrics, health, groups, operations, dumps and a live page.

It runs in a thread of its own that sleeps between requests. Starlette and uvicorn are imported when
it is started, and come with the extra ``dist2[control-plane]``.
"""

from __future__ import annotations

import logging
import secrets
import socket
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from dist2.backends.socket.address import data_host
from dist2.errors import ArgumentTypeError, BackendUnavailableError, Dist2Error, InvalidUsageError
from dist2.group.open_groups import open_groups
from dist2.operation.instruments import dispatch
from dist2.operation.signature import GroupInfo
from dist2.runtime.config import Config
from dist2.runtime.deadline import seconds
from dist2.runtime.process import AtExit, InChild, at_exit, in_child
from dist2.security.authenticator import Credentials
from observability import automatic, token_files
from observability.access import NEEDS_TLS, is_loopback, job_token
from observability.client import Asker
from observability.flight_recorder import instrument as recorder
from observability.incidents.hang import HangRecorder
from observability.job.directory import Directory
from observability.job.foreign_stacks import memory
from observability.job.member import Member
from observability.job.watch import Watch
from observability.metrics import instrument as metrics
from observability.server.history import EVERY_S, History

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from dist2.group.process_group import ProcessGroup
    from observability.server.acts import Acts
    from observability.server.performance import Performance
    from observability.server.serving import Serving


log = logging.getLogger("dist2.control_plane")


class Server:
    """A running control plane; a context manager that closes it.

    Attributes:
        url: Where it listens: ``http://127.0.0.1:40123``.
        token: The token of each request: ``Authorization: Bearer <token>``.

    Examples:
        >>> with observability.start(pg, announce=False) as server:
        ...     print(server.closed)
        False
        >>> server.closed
        True
    """

    def __init__(
        self,
        listener: socket.socket,
        serving: Serving,
        url: str,
        member: Member,
        acts: Acts,
        performance: Performance,
    ) -> None:
        self.url = url
        self.token = member.token
        self._member = member
        self._acts = acts
        self._performance = performance
        name = listener.getsockname()
        self._unix_socket = Path(name) if isinstance(name, str) else None
        self._listener = listener
        self._serving = serving
        memory.opened(serving.thread_id)
        memory.note(member.witness.position()["place"])  # known also of a process that is stopped at once
        self._token_file = token_files.write(url, self.token, _job_of(member))
        _running.add(self)

    @property
    def page_url(self) -> str:
        """The link to the live page, for a browser. It contains the token: keep it private.

        Examples:
            >>> with observability.start(pg, announce=False) as server:
            ...     print(server.page_url == f"{server.url}/#token={server.token}")
            True
        """
        return f"{self.url}/#token={self.token}"

    @property
    def closed(self) -> bool:
        """Whether it has stopped.

        Examples:
            >>> with observability.start(pg, announce=False) as server:
            ...     print(server.closed)
            False
        """
        return not self._serving.is_alive()

    def close(self) -> None:
        """Stop listening, close its connections and end its thread. Idempotent.

        Examples:
            >>> server = observability.start(pg, announce=False)
            >>> server.close()
            >>> server.closed
            True
        """
        _running.discard(self)
        self._performance.stop()
        self._member.close()
        self._acts.close()
        memory.closed(self._serving.thread_id)
        self._serving.stop()
        self._remove_files()

    def _remove_files(self) -> None:
        """Remove the Unix socket, and the file in which commands find the token. Idempotent."""
        if self._unix_socket is not None:
            self._unix_socket.unlink(missing_ok=True)
            self._unix_socket = None
        if self._token_file is not None:
            token_files.remove(self._token_file)
            self._token_file = None

    def offer_to_torch(self) -> None:
        """List this rank in torch's debug server (``torch.distributed.debug``), in place of torch's worker.

        Call it after torch's ``start_debug_server``, or without it where its frontend runs elsewhere. The
        frontend then shows the stacks and the flight recorder of this process. The entry in the store
        at ``MASTER_ADDR:MASTER_PORT`` opens the handlers of this control plane without the token.

        Raises:
            InvalidUsageError: ``MASTER_ADDR`` and ``MASTER_PORT`` are not set.
            StoreError: The store there cannot be reached.

        Examples:
            >>> with observability.start(pg, announce=False) as server:
            ...     server.offer_to_torch()  # doctest: +SKIP
        """
        from observability.server.handlers import offer_to_torch

        offer_to_torch(self.url, self.token, self._member.rank)

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


def running() -> list[Server]:
    """Return the control planes of this process that were not closed."""
    return list(_running)


def start(
    pg: ProcessGroup | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    *,
    waiting_after_s: float | None = None,
    dumps: str | Path = "dumps",
    unix_socket: str | Path | None = None,
    announce: bool = True,
) -> Server:
    """Start the control plane of this process.

    Every rank should start one, with the same group: they find each other through its store, and any of them
    answers for the whole job. Each shows all groups of its own process. It answers only requests that bear
    the token.

    Args:
        pg: The group whose rank names this process, and in whose store the ranks find each other; by default
            the first that is open. Without one, the control plane shows this process only.
        host: Address to listen on, by which other ranks reach it; of ``0.0.0.0`` they use the one on the way
            to the group's store. Anything but loopback needs TLS: ``DIST2_TLS_CERT``, ``DIST2_TLS_KEY`` and
            ``DIST2_TLS_CA``.
        port: 0 takes a free one.
        token: The token of requests; the same on all ranks. Default: ``DIST2_CONTROL_TOKEN``; without that
            it is derived from ``DIST2_SECRET`` and ``DIST2_JOB_ID``; without a secret, ranks agree on a
            random one through the store of the group.
        waiting_after_s: An operation that takes longer counts as waiting, in seconds: `/healthz` and the log
            then say for which ranks. Default: ``DIST2_WAITING`` or 5 s.
        dumps: Folder for the flight recorder's dumps that clients ask for.
        unix_socket: Path of a Unix socket to listen on instead of ``host`` and ``port``; only this user may
            connect, with the token. `Server.url` is then ``unix://`` and the quoted path.
        announce: Rank 0 writes its address to standard error. With a random token this is the link to the
            live page, token included; one that was given or derived is left out.

    Returns:
        The running server; `Server.close` stops it.

    Raises:
        BackendUnavailableError: Starlette or uvicorn is not installed.
        InvalidUsageError: The address cannot be listened on or needs TLS, or the token, the secret or a
            certificate is unusable.

    Examples:
        >>> server = observability.start(pg, announce=False)
        >>> server.url.startswith("http://127.0.0.1:")
        True
        >>> server.close()
    """
    app_of, serving_type, acts_type, performance_of = _implementation()
    config = Config.from_environment()
    credentials = Credentials.of(config)
    tls = credentials.tls
    after_s = config.waiting_s if waiting_after_s is None else seconds(waiting_after_s, "waiting_after_s")
    token = config.control_token if token is None else token
    if token is not None:
        _check(token)
    _load_instruments(pg)
    automatic.give_way()
    if unix_socket is not None:
        tls = None  # other hosts and users cannot connect
        listener, url = _listen_unix(Path(unix_socket)), f"unix://{quote(str(unix_socket), safe='')}"
    else:
        listener = _listen(host, port, tls is not None)
        port = listener.getsockname()[1]
        named = _reached_by(host, pg or _first_open())
        named = f"[{named}]" if ":" in named else named
        url = f"{'http' if tls is None else 'https'}://{named}:{port}"
    try:
        known_token = token or job_token(credentials)
        member = _member(pg, credentials, known_token, url, after_s)
        acts = acts_type(member, recorder, dumps)
        performance = performance_of(recorder, member, url, Asker(credentials).ask)
        history = History(metrics)
        parts = {"member": member, "acts": acts, "performance": performance, "history": history}
        app = app_of(metrics, recorder, token=member.token, port=port, **parts)
        serving = serving_type(
            app, listener, None if tls is None else tls.web_context(), history.sample, EVERY_S
        )
    except BaseException:
        listener.close()
        raise
    assert member.watch is not None
    member.watch.start()
    performance.start()
    server = Server(listener, serving, url, member, acts, performance)
    if member.rank == 0:
        log.info("the control plane of the job is at %s", url, extra={"url": url, "rank": 0})
        if announce:
            _announce(url if known_token else server.page_url)
    return server


def _announce(url: str) -> None:
    """Write an address to standard error: a log record would not be shown by default.

    A random token is part of it, since only this job knows it; a given or derived one stays out of logs.
    """
    if sys.stderr is not None:  # pythonw, or a daemon
        sys.stderr.write(f"dist2: the control plane of this job is at {url}\n")
        sys.stderr.flush()


def _member(
    pg: ProcessGroup | None, credentials: Credentials, token: str | None, url: str, after_s: float
) -> Member:
    """Return this rank's part in the job, with one token for all ranks."""
    meeting = pg or _first_open()
    spec = getattr(meeting, "spec", None)  # groups of tests have none
    store = None if spec is None else spec.store
    directory = Directory(store, credentials, "" if meeting is None else meeting.info.uid)
    mine = token
    if mine is None:
        mine = secrets.token_urlsafe(24)
        try:
            mine = directory.agreed_token(mine)
        except (Dist2Error, RuntimeError) as error:
            log.warning("the ranks cannot agree on a token through the store of the group: %s", error)
    asker = Asker(credentials)
    info = None if pg is None else pg.info
    member = Member(metrics, recorder, info, token=mine, directory=directory, asker=asker)
    member.watch = Watch(member, url, after_s, asker)
    recording = automatic.recording()
    if recording is not None:
        recording.known = directory.entries
    member.hang = HangRecorder(member, recording, automatic.on_hang(), after_s / 2)
    return member


def _job_of(member: Member) -> token_files.Job:
    """Return the job of a member, for the commands of this host."""
    info, program = member.info(), Path(sys.argv[0]).name if sys.argv else ""
    meeting = token_files.meeting_here()
    if info is None:
        return token_files.Job(program=program, meeting=meeting)
    return token_files.Job(info.uid, info.name, member.rank, len(info.global_ranks), program, meeting)


def _first_open() -> ProcessGroup | None:
    """Return the open group that was opened first."""
    groups = {each.info: each for each in open_groups()}
    return next((groups[info] for info in metrics.statuses.open_groups() if info in groups), None)


def _implementation() -> tuple[Callable[..., ASGIApp], type[Serving], type[Acts], Callable[..., Performance]]:
    """Import the modules that need the extra."""
    try:
        from observability.server.acts import Acts
        from observability.server.app import app_of
        from observability.server.performance import performance_of
        from observability.server.serving import Serving
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise BackendUnavailableError(
            f"the control plane needs {error.name}: pip install 'dist2[control-plane]'"
        ) from error
    return app_of, Serving, Acts, performance_of


def _check(token: str) -> None:
    if not isinstance(token, str):
        raise InvalidUsageError(f"token must be a str, got {type(token).__name__}")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidUsageError("token must be printable ASCII without spaces, and not empty")


def _load_instruments(pg: ProcessGroup | None) -> None:
    """Load the instruments whose data the control plane shows, also if they were switched off."""
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
        raise InvalidUsageError(f"host={host!r} is reachable from other machines: {NEEDS_TLS}")
    return listener


def _reached_by(host: str, pg: ProcessGroup | None) -> str:
    """Return the address that other ranks connect to; of all addresses the one on the way to the store."""
    spec = getattr(pg, "spec", None)  # groups of tests have none
    if host not in ("0.0.0.0", "::") or spec is None:
        return host
    route = data_host(spec.store)
    return route if (":" in route) == (":" in host) else host


def _listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket that only this user may connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and listener.connect_ex(str(path)) != 0:
            path.unlink()  # of a process that has ended
        listener.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o600)  # before it listens: no client can connect until then
        listener.listen()
    except OSError as error:
        listener.close()
        raise InvalidUsageError(f"cannot listen on unix_socket={str(path)!r}: {error}") from error
    return listener


@at_exit(AtExit.CONTROL_PLANE)
def _exiting() -> None:
    for server in list(_running):
        server._remove_files()
        if server._member.watch is not None:
            with suppress(Exception):  # a line of a log is no reason for an error at exit
                server._member.watch.tell_end()


@in_child(InChild.CONTROL_PLANE)
def _forked() -> None:
    for server in list(_running):
        server.close_inherited()
    _running.clear()
