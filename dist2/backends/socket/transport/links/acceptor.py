"""`Acceptor`: the listening socket of a process, and connections that are not yet authenticated.

Such a *stranger* costs a descriptor and a few hundred bytes, for a bounded time. There is a bounded number of
strangers: one more closes the one that has been silent longest. So members can connect, for any number of
strangers.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections.abc import Iterator

import attrs

from dist2.backends.socket.transport.links.pacing import begin
from dist2.backends.socket.wire import HEADER_BYTES, Header, Hello, Kind
from dist2.errors import AuthenticationError, RendezvousError, WireError
from dist2.runtime.resources import shortage, system_call
from dist2.runtime.tcp_keepalive import keep_alive
from dist2.security.authenticator import ConnectionAuthenticator, Credentials, Stream, hang_up, uninvited
from dist2.security.handshake import Listener, Plane
from dist2.security.refusals import reason_of, refusals

HANDSHAKE_S = 10.0
"""How long a stranger may take to say hello."""
MAX_STRANGERS = 256
_BACKLOG = 4096
"""Connections wait in the kernel while this process computes; strangers must not fill that queue."""
_AT_ONCE = 64
_SWEEP_S = 0.5

log = logging.getLogger("dist2.fabric")


@attrs.frozen
class Guest:
    """A connection whose other side has sent its hello.

    Attributes:
        stream: The connection; bytes after the hello are unread.
        hello: The hello.
        address: Where it comes from, for logs.
        proven: `identity` of the fabric id that was proved; None where nothing is.
    """

    stream: Stream
    hello: Hello
    address: str
    proven: bytes | None


class Stranger:
    """A connection that was accepted: authenticated if need be, then read up to the end of its hello.

    Attributes:
        address: Where it comes from.
        since: When it came.
    """

    def __init__(self, sock: socket.socket, address: str, entrance: ConnectionAuthenticator | None) -> None:
        self._sock = sock
        self.address = address
        self.since = time.monotonic()
        self._entrance = entrance
        self._inside = entrance is None
        self._header: Header | None = None
        self._heard = b""

    @property
    def stream(self) -> Stream:
        """The connection."""
        return self._sock if self._entrance is None else self._entrance.stream

    @property
    def addressed(self) -> bool:
        """Whether it has named this process, as only members can."""
        handshake = self._entrance and self._entrance.handshake
        return isinstance(handshake, Listener) and handshake.addressed

    @property
    def events(self) -> int:
        """The events to poll for."""
        return select.POLLIN if self._inside or self._entrance is None else self._entrance.events

    def hear(self) -> Guest | None:
        """Read available bytes, but none beyond the hello; None before the hello is complete.

        Raises:
            WireError: It is refused.
            EOFError: It closed the connection.
            OSError: The connection is gone.
        """
        entrance = self._entrance
        if not self._inside:
            assert entrance is not None  # else it is inside
            if not entrance.advance():
                return None
            self._inside = True
        try:
            while (hello := self._next()) is None:
                pass
        except BlockingIOError:
            return None
        listener = entrance.handshake if entrance is not None else None
        proven = listener.caller if isinstance(listener, Listener) else None
        return Guest(self.stream, hello, self.address, proven)

    def _next(self) -> Hello | None:
        """Read once; return the hello if that was the end of it."""
        wanted = HEADER_BYTES if self._header is None else self._header.nbytes
        data = self.stream.recv(wanted - len(self._heard))
        if not data:
            raise EOFError
        self._heard += data
        if len(self._heard) < wanted:
            return None
        heard, self._heard = self._heard, b""
        if self._header is None:
            self._header = _header_of_hello(heard)
            return None
        return Hello.decode(heard)


def _header_of_hello(data: bytes) -> Header:
    error = uninvited(data)
    if error is not None:
        raise error
    header = Header.decode(data)
    if header.kind is not Kind.HELLO or not header.nbytes:
        raise WireError(f"a {header.kind.name} frame of {header.nbytes} bytes before a hello")
    return header


class Acceptor:
    """The listening socket, and strangers.

    Args:
        host: Address to bind; no other is listened on.
        credentials: The proof required of strangers.
        me: Fabric id of this process.
        epoll: Reports events: `serve` descriptors that are ``in`` the acceptor.
        heartbeat_s: How long a host may be silent before its processes are held for dead, in seconds.
        congestion: See `Linkage`.

    Attributes:
        port: That it listens on.
        paused: Whether accepting pauses for lack of descriptors.

    Raises:
        RendezvousError: The address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        me: str,
        epoll: select.epoll,
        heartbeat_s: float = 10.0,
        congestion: str = "reno",
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._listener = _listen(host)
        begin(self._listener, congestion)
        self.port: int = self._listener.getsockname()[1]
        self._credentials = credentials
        self._me = me
        self._epoll = epoll
        self._strangers: dict[int, Stranger] = {}
        self._next_sweep = 0.0
        self.paused, self._is_short = False, False
        epoll.register(self._listener.fileno(), select.EPOLLIN)

    def __len__(self) -> int:
        """Return how many strangers there are."""
        return len(self._strangers)

    def __bool__(self) -> bool:
        """Whether `sweep` has something to do: there are strangers, or accepting pauses."""
        return self.paused or bool(self._strangers)

    def __contains__(self, fd: int) -> bool:
        return fd in self._strangers or fd == self._listener.fileno()

    def serve(self, fd: int) -> Iterator[Guest]:
        """Handle a descriptor that is ready; yield a caller that has said hello."""
        if fd == self._listener.fileno():
            yield from self.accept()
        elif fd in self._strangers:
            yield from self._hear(fd)

    def accept(self) -> Iterator[Guest]:
        """Accept connections, some at a time; yield callers that have said hello already."""
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                yield from self._out_of_descriptors(error)
                return
            self._is_short = False
            yield from self._expire(time.monotonic())
            yield from self._make_room(MAX_STRANGERS)
            prepare(sock)
            keep_alive(sock, self._heartbeat_s)
            entrance = None
            if self._credentials.required:
                entrance = self._credentials.listening(sock, Plane.DATA, self._me)
            yield from self._hold(Stranger(sock, f"{address[0]}:{address[1]}", entrance))

    def adopt(self, sock: socket.socket) -> Iterator[Guest]:
        """Take in a connection from inside this process, which has nothing to prove."""
        yield from self._hold(Stranger(sock, "this process", None))

    def sweep(self) -> Iterator[Guest]:
        """Close strangers that have taken too long; do nothing if that was done a moment ago.

        Also accept connections again after a pause.
        """
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            yield from self._expire(now)
            self._pause(False)

    def _expire(self, now: float) -> Iterator[Guest]:
        limit = now - HANDSHAKE_S
        for fd in [fd for fd, stranger in self._strangers.items() if stranger.since < limit]:
            yield from self._hear(fd)  # perhaps it was this process that let the other wait
            if fd in self._strangers:
                self._turn_away(fd, "silent", f"no hello within {HANDSHAKE_S} s")

    def close(self) -> None:
        """Close the listening socket and all strangers, without a message to them."""
        self._listener.close()
        for stranger in self._strangers.values():
            stranger.stream.close()
        self._strangers.clear()

    def _hold(self, stranger: Stranger) -> Iterator[Guest]:
        fd = stranger.stream.fileno()
        self._strangers[fd] = stranger
        self._epoll.register(fd, stranger.events)
        yield from self._hear(fd)

    def _hear(self, fd: int) -> Iterator[Guest]:
        stranger = self._strangers[fd]
        try:
            guest = stranger.hear()
        except WireError as error:
            self._turn_away(fd, reason_of(error), str(error), error)
        except (EOFError, OSError) as error:
            self._turn_away(fd, "ended", f"it ended before its hello {error}".rstrip())
        else:
            if guest is None:
                self._epoll.modify(fd, stranger.events)
            else:
                self._forget(fd)
                yield guest

    def _make_room(self, most: int) -> Iterator[Guest]:
        """Close strangers until there are fewer than so many, after reading their data."""
        while len(self._strangers) >= most:
            quiet = (fd for fd, stranger in self._strangers.items() if not stranger.addressed)
            fd = next(quiet, next(iter(self._strangers)))
            yield from self._hear(fd)
            if fd in self._strangers:
                self._turn_away(fd, "crowded", "too many connections have not sent a hello")

    def _out_of_descriptors(self, error: OSError) -> Iterator[Guest]:
        """Close a stranger, if there is one, to make room for a caller that waits in the kernel.

        If there is none, pause: the listener stays readable.
        """
        if self._strangers and error.errno in (errno.EMFILE, errno.ENFILE):
            yield from self._make_room(len(self._strangers))
            return
        self._next_sweep = time.monotonic() + _SWEEP_S
        self._pause(True)
        if not self._is_short:  # told once, until a connection is accepted
            self._is_short = True
            refused = shortage(error, "accept")
            log.warning(
                "port %s cannot accept a connection: %s", self.port, refused, extra={"port": self.port}
            )

    def _pause(self, paused: bool) -> None:
        if paused is not self.paused:
            self._epoll.modify(self._listener.fileno(), 0 if paused else select.EPOLLIN)
            self.paused = paused

    def _turn_away(self, fd: int, reason: str, why: str, error: WireError | None = None) -> None:
        stranger = self._forget(fd)
        refusals.note("data", reason, stranger.address, why, port=self.port)
        hang_up(stranger.stream, error if isinstance(error, AuthenticationError) else None)

    def _forget(self, fd: int) -> Stranger:
        self._epoll.unregister(fd)
        return self._strangers.pop(fd)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with system_call("socket"):
        listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"host {host!r} cannot be listened on: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


_SOCKET_BYTES = 1 << 20


def prepare(sock: socket.socket) -> None:
    """Set a connection up as links need it."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
