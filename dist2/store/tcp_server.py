"""The store server's thread: sockets around `StoreCore`.

Theory of operation: one thread polls the listener, all connections, and an eventfd by which other threads
stop it. A new connection is a *stranger*: it authenticates if that is required, and sends VALIDATE, within a
time limit; the number of strangers is bounded, and the oldest one is closed for a new one. Then it has a
session of the core, to which its bytes go. The core returns the sessions with answers. A client that does not
read its answers is not read from either, so that it cannot fill the server's memory.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import selectors
import socket
import threading
from collections.abc import Callable

from dist2.errors import AuthenticationError, WireError
from dist2.runtime.deadline import deadline_in, monotonic_ns
from dist2.runtime.resources import shortage, system_call
from dist2.runtime.tcp_keepalive import keep_alive
from dist2.security.authenticator import ConnectionAuthenticator, Credentials, Stream, hang_up, uninvited
from dist2.security.handshake import Plane
from dist2.security.refusals import refusals
from dist2.security.tls import receive
from dist2.store import lifetime
from dist2.store.protocol import DEFAULT_LIMITS, Limits
from dist2.store.server_core import Session, Stage, StoreCore

log = logging.getLogger("dist2.store")

HELLO_TIMEOUT_S = 30.0
"""How long a connection may stay silent before its hello."""
MAX_STRANGERS = 256
"""Connections that have not said hello; for one more, the one that has been silent longest is closed."""

_CLIENT_S = 60.0
"""How long a client's host may be silent: one that has vanished holds nothing but a descriptor."""
_CHUNK = 1 << 16
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_SWEEP_S = 1.0
"""Interval between checks for silent strangers, and pause of accepting without descriptors, in seconds."""


class StoreServer:
    """Serves one store on a listening socket, from a daemon thread, until `stop`.

    Args:
        listener: A bound, listening socket; taken over.
        limits: How large messages may be.
        credentials: The proofs that connections must give before any of their bytes is read.

    Attributes:
        host: The address it listens on.
        port: The port it listens on.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits = DEFAULT_LIMITS,
        credentials: Credentials | None = None,
    ) -> None:
        self._credentials = credentials or Credentials()
        self.host, self.port = listener.getsockname()[:2]
        self._core = StoreCore(limits)
        self._listener = listener
        self._listener.setblocking(False)
        self._sessions: dict[Stream, Session] = {}
        self._connections: dict[Session, Stream] = {}
        # In order of arrival, with their time limits: connections that authenticate, or without VALIDATE.
        self._strangers: dict[ConnectionAuthenticator | Stream, int] = {}
        self._authenticating: dict[ConnectionAuthenticator, str] = {}
        self._accepts_again_ns = 0
        self._is_short = False
        with system_call("epoll_create1"):
            self._selector = selectors.DefaultSelector()
        with system_call("eventfd2"):
            self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._doorbell, selectors.EVENT_READ)
        self._stopping = False
        self._retired = False
        self._lock = threading.RLock()  # a signal handler may close a store while this thread does
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name=f"dist2-store-{self.port}", daemon=True)
        lifetime.track_server(self)
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._sessions)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no client is connected; return False after the timeout."""
        return self._idle.wait(timeout_s)

    def stop(self) -> None:
        """Close all connections and the listening socket, and end the thread. May be called twice."""
        with self._lock:
            self._stopping = True
            self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def retire(self) -> None:
        """Stop as soon as no client is connected: until then others may need the keys."""
        with self._lock:
            self._retired = True
            self._ring()

    def revive(self) -> bool:
        """Undo `retire`; return False if the server has stopped already."""
        with self._lock:
            self._retired = False
            return not self._stopping

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors, without sending anything."""
        self._stopping = True
        self._lock = threading.RLock()
        inside = (*self._sessions, *(authenticator.stream for authenticator in self._authenticating))
        for connection in (self._listener, *inside):
            connection.close()
        self._selector.close()
        if self._doorbell >= 0:
            os.close(self._doorbell)
            self._doorbell = -1

    def _ring(self) -> None:
        if self._doorbell >= 0:
            os.eventfd_write(self._doorbell, 1)

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._patience_s()):
                    self._serve(key.fileobj, events)
                self._sweep()
                self._stop_if_unused()
        finally:
            self._tear_down()

    def _patience_s(self) -> float | None:
        return _SWEEP_S if self._strangers or self._accepts_again_ns else None

    def _serve(self, ready: object, events: int) -> None:
        if ready is self._listener:
            self._accept()
        elif ready == self._doorbell:
            os.eventfd_read(self._doorbell)
        elif isinstance(ready, ConnectionAuthenticator):
            if ready in self._authenticating:
                self._advance(ready)
        elif isinstance(ready, Stream) and ready in self._sessions:
            if events & selectors.EVENT_WRITE:
                self._send(ready)
                self._resume(ready)
            if events & selectors.EVENT_READ and ready in self._sessions:
                self._receive(ready)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._strangers and error.errno in _OUT_OF_DESCRIPTORS:
                    self._make_room(len(self._strangers))
                    continue
                # Out of descriptors, say. The listener stays readable, so stop polling it for a while.
                if not self._is_short:  # told once, until a connection is accepted
                    self._is_short = True
                    refused = shortage(error, "accept")
                    log.warning("the store at port %s cannot accept a connection: %s", self.port, refused)
                self._selector.unregister(self._listener)
                self._accepts_again_ns = deadline_in(_SWEEP_S)
                return
            self._is_short = False
            self._make_room(MAX_STRANGERS)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection, _CLIENT_S)
            peer = f"{address[0]}:{address[1]}"
            if self._credentials.required:
                self._authenticate(self._credentials.listening(connection, Plane.STORE, ""), peer)
            else:
                self._admit(connection, peer, deadline_in(HELLO_TIMEOUT_S))

    def _make_room(self, most: int) -> None:
        """Keep fewer than ``most`` unauthenticated connections: read the oldest once more, then close it."""
        while len(self._strangers) >= most:
            oldest = next(iter(self._strangers))
            self._serve(oldest, selectors.EVENT_READ)
            if oldest in self._strangers:
                self._turn_away(oldest, "crowded", "too many connections have not sent a hello")

    def _authenticate(self, authenticator: ConnectionAuthenticator, peer: str) -> None:
        self._authenticating[authenticator] = peer
        self._strangers[authenticator] = deadline_in(HELLO_TIMEOUT_S)
        self._selector.register(authenticator, selectors.EVENT_READ)

    def _advance(self, authenticator: ConnectionAuthenticator) -> None:
        """Continue the handshake of a connection."""
        try:
            through = authenticator.advance()
        except AuthenticationError as error:
            self._turn_away(authenticator, error.reason, str(error), error)
            return
        except (OSError, EOFError) as error:
            self._turn_away(authenticator, "ended", f"it ended before it was authenticated: {error}")
            return
        if through:
            peer, until_ns = self._forget_authenticator(authenticator)
            self._admit(authenticator.stream, peer, until_ns)
            self._receive(authenticator.stream)
        else:
            # POLLIN and POLLOUT differ from the constants of selectors
            reads = selectors.EVENT_READ if authenticator.events & select.POLLIN else 0
            self._selector.modify(authenticator, reads or selectors.EVENT_WRITE)

    def _forget_authenticator(self, authenticator: ConnectionAuthenticator) -> tuple[str, int]:
        self._selector.unregister(authenticator)
        return self._authenticating.pop(authenticator), self._strangers.pop(authenticator)

    def _turn_away(
        self,
        stranger: ConnectionAuthenticator | Stream,
        reason: str,
        why: str,
        error: AuthenticationError | None = None,
    ) -> None:
        if isinstance(stranger, ConnectionAuthenticator):
            peer, _ = self._forget_authenticator(stranger)
        else:
            peer = self._sessions[stranger].peer
        refusals.note("store", reason, peer, why, port=self.port)
        if isinstance(stranger, ConnectionAuthenticator):
            hang_up(stranger.stream, error)
        else:
            self._drop(stranger, error)

    def _admit(self, connection: Stream, peer: str, until_ns: int) -> None:
        """Add a connection as a client's, which must begin with VALIDATE."""
        session = self._core.join(peer)
        self._sessions[connection] = session
        self._connections[session] = connection
        self._strangers[connection] = until_ns
        self._selector.register(connection, selectors.EVENT_READ)
        self._idle.clear()

    def _receive(self, connection: Stream) -> None:
        session = self._sessions[connection]
        try:
            data = receive(connection, _CHUNK)
        except BlockingIOError:
            return
        except (OSError, AuthenticationError):
            data = b""
        if not data:
            self._drop(connection)
            return
        refusal = uninvited(data) if session.stage is Stage.HELLO else None
        if refusal is not None:
            self._turn_away(connection, refusal.reason, str(refusal), refusal)
            return
        self._work(connection, lambda: self._core.receive(session, data))
        if session.stage is not Stage.HELLO:
            self._strangers.pop(connection, None)

    def _work(self, connection: Stream, step: Callable[[], list[Session]]) -> None:
        """Run a step of the core for a client, and send its output."""
        try:
            answered = step()
        except WireError as error:
            session = self._sessions[connection]
            fields = {"port": self.port, "peer": session.peer}
            log.warning(
                "the store at port %s closed the connection to %s: %s", *fields.values(), error, extra=fields
            )
            if session.stage is Stage.HELLO:
                refusals.count("store", "not_the_protocol")
            self._drop(connection)
            return
        self._deliver(answered)

    def _deliver(self, answered: list[Session]) -> None:
        for session in answered:
            connection = self._connections.get(session)
            if connection is not None:
                self._send(connection)

    def _resume(self, connection: Stream) -> None:
        """Continue with a client that has fetched all answers; one step, so that others get a turn."""
        session = self._sessions.get(connection)
        if session is not None and session.held_up and not session.outgoing:
            self._work(connection, lambda: self._core.resume(session))
            if connection in self._sessions:
                self._watch(connection, session)

    def _send(self, connection: Stream) -> None:
        session = self._sessions[connection]
        outgoing = session.outgoing
        try:
            while outgoing:
                del outgoing[: connection.send(outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        self._watch(connection, session)

    def _watch(self, connection: Stream, session: Session) -> None:
        # a client that does not read its answers is not read from
        writes = bool(session.outgoing) or session.held_up
        events = selectors.EVENT_WRITE * writes | selectors.EVENT_READ * (not session.held_up)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events)

    def _drop(self, connection: Stream, error: AuthenticationError | None = None) -> None:
        session = self._sessions.pop(connection)
        del self._connections[session]
        self._strangers.pop(connection, None)
        self._selector.unregister(connection)
        hang_up(connection, error)
        self._core.leave(session)
        self._deliver(self._core.answered())
        if not self._sessions:
            self._idle.set()

    def _sweep(self) -> None:
        now = monotonic_ns()
        if self._accepts_again_ns and now >= self._accepts_again_ns:
            self._accepts_again_ns = 0
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._strangers:
            stranger, until_ns = next(iter(self._strangers.items()))
            if now < until_ns:
                break
            self._turn_away(stranger, "silent", f"no hello within {HELLO_TIMEOUT_S} s")

    def _stop_if_unused(self) -> None:
        if self._retired and not self._sessions:
            with self._lock:  # against `revive`
                self._stopping = self._stopping or self._retired

    def _tear_down(self) -> None:
        for connection in (*self._sessions, *(each.stream for each in self._authenticating)):
            connection.close()
        self._sessions.clear()
        self._authenticating.clear()
        self._strangers.clear()
        self._connections.clear()
        self._listener.close()
        self._selector.close()
        with self._lock:
            os.close(self._doorbell)
            self._doorbell = -1
        self._idle.set()
