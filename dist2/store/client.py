"""The client of a store server, for several threads: a blocked wait does not hold up other calls.

All calls share one connection, in turn, so that a thread reads its own writes. A wait that does not end
at once is *parked*: it keeps its connection, and the next call opens another one, which closes again when
there are more than one. Before a connection is parked, the server has confirmed the writes on it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dist2.errors import Dist2Error, StoreConnectionError, StoreError, StoreTimeoutError, WireError
from dist2.runtime.config import DEFAULT_HEARTBEAT_S
from dist2.runtime.deadline import Deadline
from dist2.runtime.threads import lock_with_timeout
from dist2.runtime.usage import usage
from dist2.security.authenticator import Credentials
from dist2.store import lifetime
from dist2.store.address import Address
from dist2.store.connection import Connection
from dist2.store.protocol import Query, Reply, Request

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
        self._taken = False
        self._working: Connection | None = self._connect(deadline)
        self._parked: set[Connection] = set()
        self._broke = False
        self._unusable: Dist2Error | None = None
        lifetime.track_user(self)

    def _connect(self, deadline: Deadline) -> Connection:
        return Connection.open(self.address, deadline, self._credentials, self._heartbeat_s)

    def ask(self, request: Request, deadline: Deadline) -> Reply:
        """Return the answer to a request that the server answers at once.

        Raises:
            StoreTimeoutError: It did not, within the deadline.
            StoreConnectionError: The connection is lost.
        """
        with self._turn(deadline) as connection:
            return connection.ask(request, deadline)

    def wait(self, request: Request, deadline: Deadline) -> bool:
        """Return whether a WAIT or BARRIER was met before the deadline.

        Raises:
            StoreConnectionError: The connection is lost.
        """
        with self._turn(deadline) as connection:
            if connection.unsettled and request.query is Query.BARRIER:
                connection.ask(Request(Query.PING), deadline)  # it counts, so it cannot be sent again below
            connection.send(request, deadline)
            if connection.receive(deadline.soon(_PARK_AFTER_S)) is not None:
                return True
            if connection.unsettled:
                if connection.cancel(deadline.stretched()):
                    return True
                connection.send(request, deadline)
            self._parked.add(connection)
            if self._working is connection:
                self._working = None
        try:
            met = connection.receive(deadline) is not None or connection.cancel(deadline.stretched())
        except StoreTimeoutError:  # no answer to the cancellation either
            self._unpark(connection, keep=False)
            return False
        except BaseException as error:
            self._unpark(connection, keep=False)
            self._note(error)
            raise
        self._unpark(connection, keep=True)
        return met

    def close(self) -> None:
        """End all connections; threads that wait on one get a `StoreError`."""
        self._unusable = self._unusable or StoreError(f"the store at {self.address} is closed")
        for connection in (self._working, *tuple(self._parked)):
            if connection is not None:
                connection.shut()
        # Its user was just woken. A destructor may run while this very thread holds the lock.
        with lock_with_timeout(self._lock, _LET_GO_S) as mine:
            if mine and not self._taken:
                self._drop_working()

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors, without a word to the server."""
        self._unusable = StoreError(
            f"the store at {self.address} was opened by the parent process: open another after fork"
        )
        for connection in (self._working, *self._parked):
            if connection is not None:
                connection.close()
        self._working = None
        self._parked.clear()
        self._lock = threading.RLock()

    @contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[Connection]:
        """Have the working connection to oneself."""
        self._require_usable()
        with lock_with_timeout(self._lock, deadline.remaining_s()) as mine:
            if not mine:
                raise StoreTimeoutError(
                    f"timeout after {deadline.milliseconds}ms: {self.address} answers another call"
                )
            with self._nested_turn(deadline) if self._taken else self._first_turn(deadline) as connection:
                yield connection

    @contextmanager
    def _first_turn(self, deadline: Deadline) -> Iterator[Connection]:
        self._taken = True
        try:
            if self._working is None:
                self._working = self._connect(deadline)
                if self._broke:
                    self._broke = False
                    usage.reconnected("store")
            yield self._working
        except BaseException as error:
            self._broke = self._working is not None
            self._drop_working()
            self._note(error)
            raise
        finally:
            self._taken = False
            if self._unusable is not None:
                self._drop_working()

    @contextmanager
    def _nested_turn(self, deadline: Deadline) -> Iterator[Connection]:
        # The working connection is in the middle of an exchange of this same thread.
        connection = self._connect(deadline)
        try:
            yield connection
        finally:
            if connection not in self._parked:
                connection.close()

    def _unpark(self, connection: Connection, keep: bool) -> None:
        """Make a parked connection the working one, if there is none and it is sound; else close it."""
        self._parked.discard(connection)
        if keep:
            with lock_with_timeout(self._lock, 0) as mine:
                if mine and self._working is None and self._unusable is None:
                    self._working = connection
                    return
        connection.close()

    def _drop_working(self) -> None:
        if self._working is not None:
            self._working.close()
            self._working = None

    def _note(self, error: BaseException) -> None:
        """Remember that the server is gone; raise a better error where its last words give a reason."""
        if self._unusable is not None:
            raise self._refusal() from error
        lost = isinstance(error, (StoreConnectionError, WireError))
        if lost and not isinstance(error, StoreTimeoutError):
            self._unusable = StoreConnectionError(str(error))
            if self.server:
                self._unusable = StoreConnectionError(f"the store of {self.server} is gone: {error}")
                raise self._refusal() from error

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise self._refusal()

    def _refusal(self) -> Dist2Error:
        """Return a new error that says why the store cannot be used: one error object is for one raise."""
        return type(self._unusable)(str(self._unusable)) if self._unusable else StoreError("unusable")
