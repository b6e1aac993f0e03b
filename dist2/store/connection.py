"""One connection of a store client: requests out, answers in, each within a deadline."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import weakref
from collections import deque
from contextlib import suppress

from dist2.errors import (
    AuthenticationError,
    Dist2Error,
    ResourceError,
    StoreConnectionError,
    StoreConnectTimeoutError,
    StoreTimeoutError,
    WireError,
)
from dist2.runtime.deadline import Deadline
from dist2.runtime.resources import check_scarcity
from dist2.runtime.tcp_keepalive import SILENT_LOOKS, is_silent, keep_alive
from dist2.runtime.usage import usage
from dist2.security.authenticator import Credentials, Stream
from dist2.security.handshake import MAGIC as HANDSHAKE_MAGIC
from dist2.security.handshake import Plane, Reason, explanation, refusal
from dist2.security.tls import receive, socket_below
from dist2.store.address import Address, SocketAddress
from dist2.store.protocol import MAGIC, WAIT_CANCELED, Query, Reply, ReplyDecoder, Request, encode_request

_CHUNK = 1 << 16
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_LONGEST_POLL_MS = (1 << 31) - 1
_HANDSHAKE_S = 10.0
_LOOK_MS = 1000
"""How often a wait looks whether the server's host is still there."""
_CUTS = 5
"""Handshakes that a busy server may cut off before the client gives up."""


class Connection:
    """A connected socket, after VALIDATE. For one thread at a time, except for `shut`.

    Attributes:
        unsettled: Whether a write was sent that the server may not have processed: writes have no answer,
            but any later answer on the same connection proves that they were.
    """

    def __init__(self, stream: Stream, address: Address, heartbeat_s: float) -> None:
        self._socket = stream
        self._poll_in = select.poll()
        self._poll_in.register(stream, select.POLLIN)
        self._address = address
        self._heartbeat_s = heartbeat_s
        self._decoder = ReplyDecoder()
        self._replies: deque[Reply] = deque()
        self.unsettled = False
        usage.opened("store")
        # A store that is dropped while a traceback refers to it ends in a cycle, and parts of a cycle
        # are finalised in any order; this closes the socket first. Nor need an interrupted clean-up do it.
        self._finalize = weakref.finalize(self, _close, stream)
        self._finalize.atexit = False

    @classmethod
    def open(
        cls,
        address: Address,
        deadline: Deadline,
        credentials: Credentials,
        heartbeat_s: float,
        *,
        again: bool = False,
    ) -> Connection:
        """Connect; try again while no server listens, until the deadline.

        Args:
            address: Of the server.
            deadline: When to give up.
            credentials: The proofs that both sides require.
            heartbeat_s: Silence, in seconds, after which the server's host counts as gone.
            again: Whether the server has listened before: where it does not now, it has ended.

        Raises:
            StoreConnectTimeoutError: No server answered in time.
            StoreConnectionError: The server has ended.
            AuthenticationError: The server does not let this process in, or does not know the secret.
            WireError: The server is no store.
        """
        pause_s = _FIRST_PAUSE_S
        cut_off = 0
        while True:
            try:
                return cls.attempt(address, deadline, credentials, heartbeat_s)
            except (OSError, StoreTimeoutError, EOFError) as error:
                if is_a_handlers(error) or isinstance(error, ResourceError):
                    raise
                failure = error
                cut_off += isinstance(error, EOFError)
            if again and isinstance(failure, OSError) and failure.errno == errno.ECONNREFUSED:
                raise _lost(address, os.strerror(errno.ECONNREFUSED)) from failure
            if cut_off == _CUTS:
                raise AuthenticationError(
                    f"the store at {address} does not authenticate itself: has it no "
                    "DIST2_SECRET or DIST2_TLS_CERT, or is it torch's own?",
                    reason="cut_off",
                ) from failure
            deadline.pause(pause_s)
            if deadline.passed:
                break
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        raise StoreConnectTimeoutError(
            f"The client socket has timed out after {deadline.milliseconds}ms while trying to connect to "
            f"({address.host}, {address.port}): {failure}"
        ) from failure

    @classmethod
    def attempt(
        cls, address: Address, deadline: Deadline, credentials: Credentials, heartbeat_s: float
    ) -> Connection:
        """Connect, or raise at once if no server listens; as `open`.

        Raises:
            OSError: No server listens.
            EOFError: The server hung up.
        """
        failure: Exception = StoreConnectionError(f"{address} has no socket address")
        for family, where in address.resolve(deadline):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            except OSError as error:
                check_scarcity(error, "socket")
                failure = error
                continue
            stream: Stream = sock
            try:
                keep_alive(sock, heartbeat_s)
                stream = _connect(sock, where, address, deadline, credentials)
                connection = cls(stream, address, heartbeat_s)
                connection._greet(deadline)
            except (OSError, StoreTimeoutError) as error:
                stream.close()
                failure = error
            except BaseException:
                stream.close()
                raise
            else:
                return connection
        raise failure

    def _greet(self, deadline: Deadline) -> None:
        nonce = os.getpid() & 0xFFFFFFFF
        self.send(Request(Query.VALIDATE, number=MAGIC), deadline)
        echo = self.ask(Request(Query.PING, number=nonce), deadline).number
        if echo != nonce:
            raise self._no_store(echo.to_bytes(4, "little"))

    def _no_store(self, answer: bytes) -> WireError:
        """Return why an answer to a ping is no echo."""
        if HANDSHAKE_MAGIC.startswith(answer):
            answer = refusal(Reason.NO_SECRET_THERE, Plane.STORE)
        return self._not_let_in(answer) or WireError(
            f"the server at {self._address} is no store: its answer to a ping is not an echo"
        )

    def _not_let_in(self, answer: bytes) -> AuthenticationError | None:
        """Return the error that an answer stands for if it is a refusal, else None."""
        why = explanation(answer)
        if why is None:
            return None
        return AuthenticationError(f"the store at {self._address}: {why}", reason=why.reason)

    def ask(self, request: Request, deadline: Deadline) -> Reply:
        """Send a request, and return its answer; nothing where it has none.

        Raises:
            StoreTimeoutError: It was not answered in time; the connection is of no use any more.
            StoreConnectionError: The server closed the connection.
        """
        self.send(request, deadline)
        if not request.is_answered:
            return Reply()
        reply = self.receive(deadline)
        if reply is None:
            raise self._too_late(request.query.name.lower(), deadline)
        return reply

    def send(self, request: Request, deadline: Deadline) -> None:
        """Send a request; its answer, if it has one, is for `receive`."""
        self._decoder.expect(request)
        self._write(request, deadline)
        usage.requested(request.query.name.lower())
        if not request.is_answered:
            self.unsettled = True

    def _write(self, request: Request, deadline: Deadline) -> None:
        data = encode_request(request)
        sent = 0
        while sent < len(data):
            try:
                sent += self._socket.send(memoryview(data)[sent:])
            except BlockingIOError:
                self._await_writable(deadline)
            except OSError as error:
                if is_a_handlers(error):
                    raise
                self._hear_why()
                raise self._lost(f"{error.strerror or error} while sending {len(data)} bytes") from error

    def _await_writable(self, deadline: Deadline) -> None:
        poll_out = select.poll()
        poll_out.register(self._socket, select.POLLOUT)
        if not self._is_ready(poll_out, deadline):
            raise self._too_late("send", deadline)

    def _is_ready(self, poll: select.poll, deadline: Deadline) -> bool:
        """Wait until a poll has something; False if the deadline passes first.

        Raises:
            StoreConnectionError: The server's host has vanished; a server that is slow, or stopped, has not.
        """
        silent = 0
        while not poll.poll(_milliseconds(deadline, _LOOK_MS)):
            if deadline.passed:
                return False
            silent = silent + 1 if self._is_silent() else 0
            if silent >= SILENT_LOOKS:
                raise self._lost(f"its host has not answered for {self._heartbeat_s:g} s")
        return True

    def _is_silent(self) -> bool:
        return is_silent(socket_below(self._socket), self._heartbeat_s)

    def _hear_why(self) -> None:
        """Raise the refusal that the server sent before it closed the connection, if it sent one."""
        data = b""
        with suppress(OSError):
            data = receive(self._socket, _CHUNK)
        refused = self._not_let_in(data)
        if refused is not None:
            raise refused

    def receive(self, deadline: Deadline) -> Reply | None:
        """Return the next answer, or None when the deadline has passed.

        Raises:
            StoreConnectionError: The server closed the connection.
            WireError: The server does not keep to the protocol.
        """
        while not self._replies:
            if not self._is_ready(self._poll_in, deadline):
                return None
            try:
                data = receive(self._socket, _CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                if is_a_handlers(error):
                    raise
                raise self._lost(error.strerror or str(error)) from error
            if not data:
                raise self._lost("Did the remote server shutdown or crash?")
            try:
                self._replies.extend(self._decoder.feed(data))
            except WireError as error:
                raise self._not_let_in(data) or error from None
        self.unsettled = False
        return self._replies.popleft()

    def cancel(self, deadline: Deadline) -> bool:
        """Take back the WAIT or BARRIER that was sent last; return whether it was met after all.

        Raises:
            StoreTimeoutError: Even that was not answered in time; the connection is of no use any more.
        """
        request = Request(Query.CANCEL_WAIT)
        # A wait that is cancelled has one answer, one that was met meanwhile has two.
        self._decoder.expect(request)
        self._write(request, deadline)
        reply = self.receive(deadline)
        if reply is not None and reply.number == WAIT_CANCELED:
            self._decoder.unexpect()
            return False
        if reply is None or self.receive(deadline) is None:
            raise self._too_late("cancel_wait", deadline)
        return True

    def close(self) -> None:
        """Free the socket; no thread may be using it. May be called twice."""
        self._finalize()
        self._socket.close()  # finalizers do nothing any more while the process ends

    def shut(self) -> None:
        """End the connection, from any thread: a waiting call raises `StoreConnectionError`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it had ended
            return

    def _too_late(self, what: str, deadline: Deadline) -> StoreTimeoutError:
        return _too_late(what, deadline, self._address)

    def _lost(self, why: str) -> StoreConnectionError:
        return _lost(self._address, why)


def is_a_handlers(error: Exception) -> bool:
    """Whether a signal handler of the program raised it: errors of system calls have a number."""
    return isinstance(error, OSError) and error.errno is None and not isinstance(error, Dist2Error)


def _close(stream: Stream) -> None:
    stream.close()
    usage.closed("store")


def _milliseconds(deadline: Deadline, at_most: int = _LONGEST_POLL_MS) -> int | None:
    """Return the remaining time as `select.poll` takes it, rounded up; None without a limit."""
    left_s = deadline.remaining_s()
    if left_s is None:
        return None if at_most == _LONGEST_POLL_MS else at_most
    return min(math.ceil(left_s * 1000), at_most)


def _connect(
    sock: socket.socket,
    where: SocketAddress,
    address: Address,
    deadline: Deadline,
    credentials: Credentials,
) -> Stream:
    """Return a connection on which both sides have authenticated, where that is required.

    Raises:
        EOFError: The server ended it before that.
    """
    # Not `settimeout`, which is a system call a time, and polls again before each transfer.
    sock.setblocking(False)
    problem = sock.connect_ex(where)
    if problem == errno.EINPROGRESS:
        if not _comes_about(sock, select.POLLOUT, deadline):
            raise _too_late("connect", deadline, address)
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise ConnectionError(problem, os.strerror(problem))
    if sock.getsockname() == sock.getpeername():
        raise StoreConnectionError(
            f"no server listens at {address}: the kernel connected this process to itself"
        )
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not credentials.required:
        return sock
    authenticator = credentials.calling(sock, Plane.STORE, "", "")
    patience = deadline.soon(_HANDSHAKE_S)
    try:
        while not authenticator.advance():
            if not _comes_about(authenticator.stream, authenticator.events, patience):
                raise EOFError(f"no answer to a handshake in {_HANDSHAKE_S} s")  # torch's server has none
    except BaseException as error:
        authenticator.stream.close()
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(f"the store at {address}: {error}", reason=error.reason) from error
        if isinstance(error, ConnectionError):  # cut off with something unread, which resets it
            raise EOFError(str(error)) from error
        raise
    return authenticator.stream


def _comes_about(stream: Stream, events: int, deadline: Deadline) -> bool:
    """Wait until a socket is ready; False at the deadline."""
    poll = select.poll()
    poll.register(stream, events)
    return bool(poll.poll(_milliseconds(deadline)))


def _lost(address: Address, why: str) -> StoreConnectionError:
    return StoreConnectionError(f"Connection to the store at {address} was closed: {why}")


def _too_late(what: str, deadline: Deadline, address: Address) -> StoreTimeoutError:
    return StoreTimeoutError(f"{what} timeout after {deadline.milliseconds}ms at {address}")
