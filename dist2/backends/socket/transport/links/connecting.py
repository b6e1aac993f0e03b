"""`Connecting`: an outgoing connection, until both sides have authenticated.

It takes the place of the stream of a `Link`: nothing can be sent over it, so that frames queue until it
is open.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence

from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.ring import RingWriter
from dist2.security.authenticator import ConnectionAuthenticator, Credentials
from dist2.security.handshake import Plane

ATTEMPTS = 4
"""A listener that is crowded by strangers, or had to wait long for an answer, may end a handshake."""

SayHello = Callable[[], tuple[bytes, RingWriter | None]]
"""Returns the frame that says hello, and the ring that it offers."""


class Connecting:
    """A connection on its way.

    Args:
        credentials: The proof to send and to require.
        me: Fabric id of this process.
        card: The peer.
        beside: Whether it is on this host.
        hello: Called after the other side has authenticated.

    Attributes:
        ring: Carries all frames once the connection is open, in place of the socket.
        attempts: How often it was tried.
    """

    def __init__(self, credentials: Credentials, me: str, card: Card, beside: bool, hello: SayHello) -> None:
        self.card = card
        self.beside = beside
        self.ring: RingWriter | None = None
        self.attempts = 0
        self._credentials = credentials
        self._me = me
        self._hello = hello
        self._entrance: ConnectionAuthenticator | None = None

    @property
    def entrance(self) -> ConnectionAuthenticator:
        """How far it is."""
        assert self._entrance is not None  # `take` was called first
        return self._entrance

    def take(self, sock: socket.socket) -> None:
        """Begin with a socket that is connected or connecting, in place of one that was cut off."""
        self.attempts += 1
        if self._entrance is not None:
            self._entrance.stream.close()
        self._entrance = self._credentials.calling(
            sock, Plane.DATA, self._me, self.card.fabric_id, self._say_hello
        )

    def _say_hello(self) -> bytes:
        frame, self.ring = self._hello()
        return frame

    # The interface of a link's stream

    def fileno(self) -> int:
        return self.entrance.fileno()

    @property
    def events(self) -> int:
        """The events to poll for."""
        return self.entrance.events | select.POLLERR

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Take nothing."""
        raise BlockingIOError

    def send(self, data: bytes) -> int:
        """Take nothing."""
        raise BlockingIOError

    def recv_into(self, buffer: memoryview) -> int:
        """Give nothing."""
        raise BlockingIOError

    def recv(self, most: int) -> bytes:
        """Give nothing."""
        raise BlockingIOError

    def shutdown(self, how: int) -> None:
        self.entrance.stream.shutdown(how)

    def close(self) -> None:
        self.entrance.stream.close()
