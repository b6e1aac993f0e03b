"""One connection of a store client: requests out, answers in, each within a deadline."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import threading
import weakref
from collections import deque

from dist2.errors import StoreConnectionError, StoreConnectTimeoutError, StoreTimeoutError, WireError
from dist2.store.address import Address, SocketAddress
from dist2.store.deadline import Deadline
from dist2.store.decoding import ReplyDecoder
from dist2.store.protocol import MAGIC, WAIT_CANCELED, Query, Reply, Request, encode_request

_CHUNK = 1 << 16
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_LONGEST_POLL_MS = (1 << 31) - 1


class Connection:
    """A connected socket that has said hello. For one thread at a time, but for `shut`.

    Attributes:
        unsettled: Whether a write was sent that the server may not have seen yet: writes are not answered,
            but whatever is answered later on the same connection shows that they were seen.
    """

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self._socket = sock
        # Not `settimeout`, which is a system call a time, and polls again before each transfer.
        self._socket.setblocking(False)
        self._poll_in = select.poll()
        self._poll_in.register(sock, select.POLLIN)
        self._address = address
        self._decoder = ReplyDecoder()
        self._replies: deque[Reply] = deque()
        self.unsettled = False
        # A store that users drop while an error's traceback still refers to it goes in a cycle, whose
        # parts are finalised in any order; this closes the socket first.
        weakref.finalize(self, sock.close).atexit = False

    @classmethod
    def open(cls, address: Address, deadline: Deadline) -> Connection:
        """Connect; try again while nobody listens, until the deadline.

        Raises:
            StoreConnectTimeoutError: Nobody answered in time.
            WireError: Who answered is no store.
        """
        pause_s = _FIRST_PAUSE_S
        never = threading.Event()
        while True:
            try:
                return cls._attempt(address, deadline)
            except (OSError, StoreTimeoutError) as error:
                failure = error
            never.wait(deadline.remaining_s(at_most=pause_s))
            if deadline.passed:
                break
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        raise StoreConnectTimeoutError(
            f"The client socket has timed out after {deadline.milliseconds}ms while trying to connect to "
            f"({address.host}, {address.port}): {failure}"
        ) from failure

    @classmethod
    def _attempt(cls, address: Address, deadline: Deadline) -> Connection:
        failure: Exception = StoreConnectionError(f"{address} has no socket address")
        for family, where in address.resolve(deadline):
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection = cls(sock, address)
            try:
                connection._greet(where, deadline)
            except (OSError, StoreTimeoutError) as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return connection
        raise failure

    def _greet(self, where: SocketAddress, deadline: Deadline) -> None:
        problem = self._socket.connect_ex(where)
        if problem == errno.EINPROGRESS:
            self._await_writable(deadline)
            problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise ConnectionError(problem, os.strerror(problem))
        if self._socket.getsockname() == self._socket.getpeername():
            raise StoreConnectionError(
                f"nobody listens at {self._address}: the kernel connected us to ourselves"
            )
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = os.getpid() & 0xFFFFFFFF
        self.send(Request(Query.VALIDATE, number=MAGIC), deadline)
        if self.ask(Request(Query.PING, number=nonce), deadline).number != nonce:
            raise WireError(
                f"who listens at {self._address} is no store: its answer to a ping is not an echo"
            )

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
                raise self._lost(f"{error.strerror or error} while sending {len(data)} bytes") from error

    def _await_writable(self, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(_milliseconds(deadline)):
            raise self._too_late("send", deadline)

    def receive(self, deadline: Deadline) -> Reply | None:
        """Return the next answer, or None when the deadline has passed.

        Raises:
            StoreConnectionError: The server closed the connection.
            WireError: The server does not keep to the protocol.
        """
        while not self._replies:
            if not self._poll_in.poll(_milliseconds(deadline)):
                return None
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from error
            if not data:
                raise self._lost("Did the remote server shutdown or crash?")
            self._replies.extend(self._decoder.feed(data))
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

    def shut(self) -> None:
        """End the connection, from any thread: who waits for an answer gets a `StoreConnectionError`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it had ended
            return

    def close(self) -> None:
        """Free the socket; nobody may be using it."""
        self._socket.close()

    def _too_late(self, what: str, deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(f"{what} timeout after {deadline.milliseconds}ms at {self._address}")

    def _lost(self, why: str) -> StoreConnectionError:
        return StoreConnectionError(f"Connection to the store at {self._address} was closed: {why}")


def _milliseconds(deadline: Deadline) -> int | None:
    """Return what is left as `select.poll` takes it, rounded up; None without a limit."""
    left_s = deadline.remaining_s()
    return None if left_s is None else min(math.ceil(left_s * 1000), _LONGEST_POLL_MS)
