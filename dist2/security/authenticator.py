"""`ConnectionAuthenticator`: TLS and then the handshake, before any other byte of a connection is read.

Theory of operation: a connection passes three stages: connected, encrypted, authenticated. Stages that the
settings do not require are passed at once. `advance` goes as far as possible without blocking, and sets
`events` to what the owner must poll for before the next call. A side that is refused gets the reason in the
protocol that it speaks: a TLS alert, or a refusal of the handshake. Both sides and all planes use this class.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import attrs

from dist2.errors import AuthenticationError
from dist2.runtime.secret import Secret
from dist2.security.handshake import (
    MAGIC,
    Caller,
    Handshake,
    Listener,
    Plane,
    Reason,
    RefusalError,
    refused_here,
)
from dist2.security.job_secrets import JobSecrets
from dist2.security.tls import TlsStream

Stream = socket.socket | TlsStream

_NO_SECRET = Secret(b"dist2: no secret")
"""With TLS alone the handshake proves nothing more, but a caller learns by it that it was let in."""

_TLS_BEGINS = b"\x16\x03"
_TLS_WANTED = bytes.fromhex("15030300020246")
"""The TLS alert for a client without a supported version of TLS."""


@attrs.frozen
class Credentials(JobSecrets):
    """`JobSecrets` with the ways in for connections."""

    @property
    def required(self) -> bool:
        """Whether a connection has to go through anything."""
        return self.secret is not None or self.tls is not None

    def calling(
        self, sock: socket.socket, plane: Plane, me: str, target: str, last: Callable[[], bytes] = bytes
    ) -> ConnectionAuthenticator:
        """Return the way in for a connection that this process makes.

        Args:
            sock: Non-blocking, and connected or connecting; taken over.
            plane: The kind of connection.
            me: The caller's identity.
            target: The identity that the caller means to reach.
            last: Called once the other side is authenticated; returns the first bytes to send.
        """
        handshake = None
        opener = b""
        if self.required:
            handshake = Caller(self.secret or _NO_SECRET, plane, self.job_id, me, target)
            opener = handshake.opener
        return ConnectionAuthenticator(sock, self._context(False), False, handshake, opener, last)

    def listening(self, sock: socket.socket, plane: Plane, me: str) -> ConnectionAuthenticator:
        """Return the way in for a connection that was accepted.

        Args:
            sock: Non-blocking; taken over.
            plane: The kind of connection.
            me: The listener's identity.
        """
        handshake = None
        if self.required:
            handshake = Listener(self.secret or _NO_SECRET, plane, self.job_id, me)
        return ConnectionAuthenticator(sock, self._context(True), True, handshake, b"", bytes)

    def _context(self, listens: bool) -> ssl.SSLContext | None:
        return None if self.tls is None else self.tls.context(listens)


class ConnectionAuthenticator:
    """A connection that is not open yet.

    Attributes:
        connected: Whether the TCP connection was established: a later failure is not the network's refusal.
        stream: The connection; free for use once `advance` has returned True.
        handshake: The state of the handshake.
        events: Events to poll for before the next `advance`: ``POLLIN`` and ``POLLOUT``, as epoll has them.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        listens: bool,
        handshake: Handshake | None,
        opener: bytes,
        last: Callable[[], bytes],
    ) -> None:
        self.stream: Stream = sock
        self.handshake = handshake
        self.events = select.POLLIN if listens else select.POLLOUT
        self._context = context
        self._listens = listens
        self.connected = listens
        self._encrypted = context is None
        self._out = bytearray(opener)
        self._last: Callable[[], bytes] | None = last

    def fileno(self) -> int:
        return self.stream.fileno()

    def advance(self) -> bool:
        """Continue as far as possible without waiting; True once the connection is open.

        Raises:
            AuthenticationError: The other side is refused, or refuses; close the connection.
            EOFError: It closed the connection.
            OSError: The connection cannot be made, or is gone.
        """
        return self._is_connected() and self._is_encrypted() and self._is_authenticated()

    def _is_connected(self) -> bool:
        if self.connected:
            return True
        assert isinstance(self.stream, socket.socket)  # not encrypted yet
        code = self.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.connected = code in (errno.ECONNRESET, errno.EPIPE)  # it was, and is no more
        if code:
            raise OSError(code, os.strerror(code))
        try:
            self.stream.getpeername()
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            poll = select.poll()
            poll.register(self.stream, select.POLLOUT)
            if any(events & select.POLLHUP for _, events in poll.poll(0)):
                self.connected = True
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error
            self.events = select.POLLOUT
            return False
        self.connected = True
        return True

    def _is_encrypted(self) -> bool:
        if self._encrypted:
            return True
        try:
            if isinstance(self.stream, socket.socket):
                if self._listens and not self._hears_tls(self.stream):
                    return False
                assert self._context is not None  # else it counts as encrypted
                self.stream = TlsStream(self.stream, self._context, self._listens)
            self.stream.shake_hands()
        except ssl.SSLWantReadError:
            self.events = select.POLLIN
            return False
        except ssl.SSLWantWriteError:
            self.events = select.POLLOUT
            return False
        except ssl.SSLEOFError as error:
            raise EOFError from error
        except ssl.SSLError as error:
            raise AuthenticationError(f"no TLS with it: {_tls_words(error)}", reason="tls") from error
        self._encrypted = True
        return True

    def _hears_tls(self, sock: socket.socket) -> bool:
        """Whether the other side speaks TLS; one that does not gets a refusal in its protocol."""
        try:
            data = sock.recv(len(_TLS_BEGINS), socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not data:
            raise EOFError
        if not _TLS_BEGINS.startswith(data):
            raise RefusalError(
                "it does not speak TLS: set DIST2_TLS_CERT, DIST2_TLS_KEY and DIST2_TLS_CA there, too",
                reason="no_tls_there",
                reply=_TLS_WANTED,
            )
        return len(data) == len(_TLS_BEGINS)

    def _is_authenticated(self) -> bool:
        handshake = self.handshake
        while True:
            if not self._has_written():
                return False
            if handshake is not None and not handshake.done:
                self.events = select.POLLIN
                try:
                    data = self.stream.recv(handshake.wanted)
                except BlockingIOError:
                    return False
                if not data:
                    raise EOFError
                if data.startswith(_TLS_BEGINS) and self._context is None:
                    raise unexpected_tls()
                self._out += handshake.feed(data)
            elif self._last is not None:
                last, self._last = self._last, None
                self._out += last()
            else:
                return True

    def _has_written(self) -> bool:
        while self._out:
            try:
                count = self.stream.send(self._out)
            except BlockingIOError:
                self.events = select.POLLOUT
                return False
            del self._out[:count]
        return True


def hang_up(stream: Stream, error: AuthenticationError | None = None) -> None:
    """Close a connection; first send the reason, if the protocol has a message for it."""
    if isinstance(error, RefusalError) and error.reply:
        with suppress(OSError):
            stream.send(error.reply)
    with suppress(OSError):  # closing with unread bytes resets the connection and may lose the reply
        if isinstance(stream, TlsStream):
            stream.discard()
        else:
            stream.recv(1 << 16)
    stream.close()


def uninvited(data: bytes) -> AuthenticationError | None:
    """Return the error for a peer that starts a handshake where no secret and no TLS is set, or None."""
    if data.startswith(MAGIC):
        return refused_here(Reason.NO_SECRET_HERE, Plane.DATA)
    return unexpected_tls() if data.startswith(_TLS_BEGINS) else None


def unexpected_tls() -> AuthenticationError:
    """Return the error for a peer that begins with TLS where this process has no certificate."""
    return AuthenticationError(
        "it speaks TLS, and this process does not: set DIST2_TLS_CERT, DIST2_TLS_KEY and DIST2_TLS_CA here, "
        "or nowhere",
        reason="tls_unexpected",
    )


def _tls_words(error: ssl.SSLError) -> str:
    words = (error.reason or str(error)).replace("_", " ").lower()
    if "wrong version number" in words or "http request" in words or "record" in words:
        return f"{words}: is DIST2_TLS_CERT set on both sides?"
    return words
