"""The client of a store server, for several threads: a blocked wait does not hold up other calls.

All calls share one connection, in turn, so that a thread reads its own writes. A wait that does not end
at once is *parked*: it keeps its connection, and the next call opens another one, which closes again when
there are more than one. Before a connection is parked, the server has confirmed the writes on it.

Theory of operation: a signal handler may raise wherever a function begins or has returned, and a second one
during the clean-up of the first. So no clean-up is needed: a turn takes the shared connection out of
`_working`, and only a completed exchange puts it back. An interrupted one just loses its connection, with
answers that nobody has read; the next turn opens another. The lock is taken and released in one frame
(`_in_turn`), since a handler may also raise between two frames of a context manager.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dist2.errors import (
    Dist2Error,
    StoreConnectionError,
    StoreConnectTimeoutError,
    StoreError,
    StoreTimeoutError,
    WireError,
)
from dist2.runtime.config import DEFAULT_HEARTBEAT_S
from dist2.runtime.deadline import Deadline
from dist2.runtime.threads import lock_with_timeout
from dist2.runtime.usage import usage
from dist2.security.authenticator import Credentials
from dist2.store import lifetime
from dist2.store.address import Address
from dist2.store.connection import Connection, is_a_handlers
from dist2.store.protocol import READY, Query, Reply, Request
from dist2.store.table import counted

_T = TypeVar("_T")

_PARK_AFTER_S = 0.005
"""How long a wait keeps others from the working connection, before they have to open one."""
_LET_GO_S = 1.0
"""Longest wait, in seconds, of `close` for a thread that was just woken to release the connection."""


class StoreClient:
    """Asks one server. Connects when made.

    After an interrupted or late answer, the connection is dropped and the next call opens another. After
    the server closed it, or its host has vanished, all calls raise: a restarted server would have
    lost all keys.

    Args:
        address: Of the server.
        deadline: When to give up connecting.
        credentials: The proofs that both sides require.
        heartbeat_s: Silence, in seconds, after which the server's host counts as gone.

    Attributes:
        server: Which process serves, in words, if that is known.
    """

    server = ""

    def __init__(
        self,
        address: Address,
        deadline: Deadline,
        credentials: Credentials | None = None,
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
    ) -> None:
        self.address = address
        self._credentials = credentials or Credentials()
        self._heartbeat_s = heartbeat_s
        # Reentrant, for signal handlers and destructors that interrupt this thread during a request.
        self._lock = threading.RLock()
        self._connections: set[weakref.ref[Connection]] = set()
        self._broke = False
        self._unusable: Dist2Error | None = None
        self._working: Connection | None = self._connected(Connection.open, deadline)
        lifetime.track_user(self)

    def _connected(
        self, connect: Callable[[Address, Deadline, Credentials, float], Connection], deadline: Deadline
    ) -> Connection:
        connection = connect(self.address, deadline, self._credentials, self._heartbeat_s)
        self._connections.add(weakref.ref(connection, self._connections.discard))
        return connection

    def ask(self, request: Request, deadline: Deadline) -> Reply:
        """Return the answer to a request that the server answers at once.

        Raises:
            StoreTimeoutError: It did not, within the deadline.
            StoreConnectionError: The connection is lost.
        """

        def exchange(connection: Connection) -> Reply:
            reply = connection.ask(request, deadline)
            self._working = connection
            return reply

        return self._in_turn(exchange, request, deadline)

    def wait(self, request: Request, deadline: Deadline) -> bool:
        """Return whether a WAIT or BARRIER was met before the deadline.

        Raises:
            StoreConnectionError: The connection is lost.
        """
        parked = self._in_turn(
            lambda connection: self._begin_wait(connection, request, deadline), request, deadline
        )
        if parked is None:
            return True
        try:
            met = parked.receive(deadline) is not None or parked.cancel(deadline.stretched())
        except StoreTimeoutError:  # no answer to the cancellation either
            parked.close()
            return False
        except BaseException as error:
            parked.close()
            self._note(error, request, deadline)
            raise
        if self._working is None:
            self._working = parked
            self._drop_if_unusable()
        else:
            parked.close()
        return met

    def _begin_wait(self, connection: Connection, request: Request, deadline: Deadline) -> Connection | None:
        """Return None if the wait was met at once, else the connection, on which it goes on."""
        if connection.unsettled and request.query is Query.BARRIER:
            connection.ask(Request(Query.PING), deadline)  # it counts, so it cannot be sent again below
        connection.send(request, deadline)
        if connection.receive(deadline.soon(_PARK_AFTER_S)) is None:
            if not connection.unsettled:
                return connection
            if not connection.cancel(deadline.stretched()):
                connection.send(request, deadline)
                return connection
        self._working = connection
        return None

    def close(self) -> None:
        """End all connections; threads that wait on one get a `StoreError`."""
        self._unusable = self._unusable or StoreError(f"the store at {self.address} is closed")
        for each in tuple(self._connections):
            connection = each()
            if connection is not None:
                connection.shut()
        # Users of the others were just woken, and close them.
        with lock_with_timeout(self._lock, _LET_GO_S):
            self._drop_if_unusable()

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors, without a word to the server."""
        self._unusable = StoreError(
            f"the store at {self.address} was opened by the parent process: open another after fork"
        )
        for each in tuple(self._connections):
            connection = each()
            if connection is not None:
                connection.close()
        self._working = None
        self._lock = threading.RLock()

    def _in_turn(self, exchange: Callable[[Connection], _T], request: Request, deadline: Deadline) -> _T:
        """Run an exchange on a connection without others; it makes this the working one when it is complete.

        A signal handler that interrupts an exchange of this thread gets another connection.
        """
        self._require_usable()
        left_s = deadline.remaining_s()
        limit_s = -1.0 if left_s is None else left_s
        connection = None
        try:
            if not self._lock.acquire(timeout=limit_s):
                raise StoreTimeoutError(
                    f"timeout after {deadline.milliseconds}ms: {self.address} answers another call"
                )
            connection, self._working = self._working, None
            if connection is None:
                connection = self._reconnect(deadline)
            return exchange(connection)
        except BaseException as error:
            if connection is not None:
                self._broke = True
                connection.close()
            if isinstance(error, StoreConnectTimeoutError) or (
                connection is not None and isinstance(error, StoreTimeoutError)
            ):
                self._name_server(error, request)
            self._note(error, request, deadline)
            raise
        finally:
            try:  # noqa: SIM105 - signal handlers could also run inside of `suppress`
                self._lock.release()
            except RuntimeError:
                pass  # it was not acquired in time
            self._drop_if_unusable()

    def _reconnect(self, deadline: Deadline) -> Connection:
        connection = self._connected(partial(Connection.open, again=True), deadline)
        if self._broke:
            self._broke = False
            usage.reconnected("store")
        return connection

    def _drop_if_unusable(self) -> None:
        if self._unusable is not None:
            connection, self._working = self._working, None
            if connection is not None:
                connection.close()

    def _note(self, error: BaseException, request: Request, deadline: Deadline) -> None:
        """Remember that the server is gone; raise a better error if there is one.

        Raises:
            InvalidUsageError: The server hung up on an addition to a value that is no number.
        """
        if self._unusable is not None:
            raise self._refusal() from error
        lost = isinstance(error, (StoreConnectionError, WireError))
        if lost and not isinstance(error, StoreTimeoutError):
            if request.query in (Query.ADD, Query.BARRIER):
                self._check_counter(request, deadline)
            self._unusable = StoreConnectionError(str(error))
            if self.server:
                self._unusable = StoreConnectionError(f"the store of {self.server} is gone: {error}")
                raise self._refusal() from error

    def _name_server(self, error: BaseException, request: Request) -> None:
        """Say whose store does not answer; a wait for keys is answered once they are set."""
        if self.server and request.query is not Query.WAIT:
            error.args = (f"{error}; the store of {self.server} does not answer: is it stopped?",)

    def _check_counter(self, request: Request, deadline: Deadline) -> None:
        """Refuse an addition that no server takes: the protocol has no answer for it but the end."""
        deadline = deadline.stretched().soon(self._heartbeat_s)  # its host may have vanished
        try:
            connection = self._connected(Connection.attempt, deadline)
            found = connection.ask(Request(Query.CHECK, request.keys), deadline).number
            if found != READY:
                return
            value = connection.ask(Request(Query.GET, request.keys), deadline).values[0]
        except (Dist2Error, OSError, EOFError) as error:
            if is_a_handlers(error):
                raise
            return  # the server is gone
        self._broke = False
        usage.reconnected("store")
        self._working = connection
        counted(request.keys[0][1:], value, request.number if request.query is Query.ADD else 1)
        self._working = None

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise self._refusal()

    def _refusal(self) -> Dist2Error:
        """Return a new error that says why the store cannot be used: one error object is for one raise."""
        return type(self._unusable)(str(self._unusable)) if self._unusable else StoreError("unusable")
