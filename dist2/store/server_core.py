"""The store server without sockets: bytes of sessions in, bytes of sessions out.

A session is one connection. It must begin with VALIDATE (`ALLOWED` has the requests of each stage); peers are
authenticated below this layer. A session that breaks the protocol gets a `WireError`; others are not
affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

from dist2.errors import InvalidUsageError, WireError
from dist2.store.protocol import (
    DEFAULT_LIMITS,
    MAGIC,
    NOT_READY,
    READY,
    STOP_WAITING,
    WAIT_CANCELED,
    Limits,
    Query,
    Reply,
    Request,
    RequestDecoder,
    encode_reply,
)
from dist2.store.table import Table

MOST_OUTGOING = 4 << 20
"""A session that has this many bytes of answers to fetch is not answered further until it does."""


class Stage(Enum):
    """How far a session is."""

    HELLO = "has not said hello"
    OPEN = "may ask"
    WAITING = "waits for keys or a barrier"


ALLOWED: dict[Stage, frozenset[Query]] = {
    Stage.HELLO: frozenset({Query.VALIDATE}),
    Stage.OPEN: frozenset(Query) - {Query.VALIDATE},
    Stage.WAITING: frozenset({Query.CANCEL_WAIT}),
}
"""The requests that a session may send at each stage."""


class Session:
    """One connection, as the core sees it.

    Attributes:
        peer: Address of the other end, for messages.
        stage: How far it is.
        outgoing: Bytes to be sent; the sender removes them from the front.
        held_up: Whether requests wait until some of ``outgoing`` was sent; see `StoreCore.resume`.
    """

    def __init__(self, peer: str, limits: Limits) -> None:
        self.peer = peer
        self.stage = Stage.HELLO
        self.held_up = False
        self.outgoing = bytearray()
        self.decoder = RequestDecoder(limits)
        self.requests: Iterator[Request] = iter(())
        # Keys that a WAIT still misses.
        self.missing: set[bytes] = set()
        # The barrier it is in, and for how many.
        self.barrier: tuple[bytes, int] | None = None
        # The queue whose item ended its last WAIT: no other waiter was woken for that item.
        self.offered: bytes | None = None


class StoreCore:
    """The keys of one server, and the sessions that wait for them.

    Args:
        limits: How large messages may be.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._table = Table()
        self._limits = limits
        # Dicts, for their order: queues are served first come, first served.
        self._waiters: dict[bytes, dict[Session, None]] = {}
        self._barriers: dict[bytes, dict[Session, None]] = {}
        self._answered: list[Session] = []
        self._handlers: dict[Query, Callable[[Session, Request], Reply | None]] = {
            Query.VALIDATE: self._validate,
            Query.SET: self._set,
            Query.COMPARE_SET: self._compare_set,
            Query.GET: self._get,
            Query.ADD: self._add,
            Query.CHECK: self._check,
            Query.WAIT: self._wait,
            Query.GETNUMKEYS: lambda _, request: Reply(len(self._table)),
            Query.DELETE_KEY: lambda _, request: Reply(self._table.delete(request.keys[0])),
            Query.APPEND: self._append,
            Query.MULTI_GET: self._multi_get,
            Query.MULTI_SET: self._multi_set,
            Query.CANCEL_WAIT: self._cancel_wait,
            Query.PING: lambda _, request: Reply(request.number),
            Query.QUEUE_PUSH: self._queue_push,
            Query.QUEUE_POP: self._queue_pop,
            Query.QUEUE_LEN: lambda _, request: Reply(self._table.queue_length(request.keys[0])),
            Query.LIST_KEYS: lambda _, request: Reply(values=self._table.keys()),
            Query.BARRIER: self._barrier,
        }

    def join(self, peer: str) -> Session:
        """Begin a session."""
        return Session(peer, self._limits)

    def receive(self, session: Session, data: bytes) -> list[Session]:
        """Take bytes of a session that is not held up; return the sessions that have something to be sent.

        Raises:
            WireError: The bytes are not the protocol. `leave` the session; others must still be served,
                see `answered`.
        """
        session.requests = session.decoder.feed(data)
        return self.resume(session)

    def resume(self, session: Session) -> list[Session]:
        """Continue with a session's requests, until too much output waits to be sent; as `receive`."""
        session.held_up = False
        for request in session.requests:
            if request.query not in ALLOWED[session.stage]:
                raise WireError(f"{request.query.name} from a client that {session.stage.value}")
            if session.offered is not None:
                self._settle_offer(session, request)
            reply = self._handlers[request.query](session, request)
            if reply is not None and request.is_answered:
                self._answer(session, request.query, reply)
            if len(session.outgoing) >= MOST_OUTGOING:
                session.held_up = True
                break
        return self.answered()

    def answered(self) -> list[Session]:
        """Return, once, the sessions that have something to be sent."""
        answered = self._answered
        self._answered = []
        return answered

    def leave(self, session: Session) -> None:
        """End a session; see `answered`."""
        self._forget(session)
        if session.offered is not None:
            self._settle_offer(session, None)

    def _answer(self, session: Session, query: Query, reply: Reply) -> None:
        session.outgoing += encode_reply(query, reply)
        self._answered.append(session)

    # Requests

    def _validate(self, session: Session, request: Request) -> None:
        if request.number != MAGIC:
            raise WireError(f"hello with magic {request.number:#010x}, expected {MAGIC:#010x}")
        session.stage = Stage.OPEN

    def _set(self, session: Session, request: Request) -> None:
        self._table.set(request.keys[0], request.values[0])
        self._appeared(request.keys[0])

    def _get(self, session: Session, request: Request) -> Reply:
        return Reply(values=(self._table.get(request.keys[0]) or b"",))

    def _compare_set(self, session: Session, request: Request) -> Reply:
        held = self._table.compare_set(request.keys[0], *request.values)
        self._appeared(request.keys[0])
        return Reply(values=(held,))

    def _add(self, session: Session, request: Request) -> Reply:
        total = self._counted(request.keys[0], request.number)
        self._appeared(request.keys[0])
        return Reply(total)

    def _counted(self, key: bytes, amount: int) -> int:
        try:
            return self._table.add(key, amount)
        except InvalidUsageError as error:
            raise WireError(str(error)) from error  # the protocol has no way to say it

    def _check(self, session: Session, request: Request) -> Reply:
        return Reply(READY if all(key in self._table for key in request.keys) else NOT_READY)

    def _append(self, session: Session, request: Request) -> None:
        held = len(self._table.get(request.keys[0]) or b"")
        if held + len(request.values[0]) > self._limits.value_bytes:  # its readers would not take it
            raise WireError(f"an appended value exceeds {self._limits.value_bytes} bytes")
        self._table.append(request.keys[0], request.values[0])
        self._appeared(request.keys[0])

    def _multi_get(self, session: Session, request: Request) -> Reply:
        values = tuple(self._table.get(key) or b"" for key in request.keys)
        if sum(map(len, values)) > self._limits.message_bytes:
            raise WireError(f"the answer to {request.query.name} exceeds {self._limits.message_bytes} bytes")
        return Reply(values=values)

    def _multi_set(self, session: Session, request: Request) -> None:
        for key, value in zip(request.keys, request.values, strict=True):
            self._table.set(key, value)
        for key in request.keys:
            self._appeared(key)

    def _queue_push(self, session: Session, request: Request) -> None:
        self._table.push(request.keys[0], request.values[0])
        self._offer(request.keys[0])

    def _queue_pop(self, session: Session, request: Request) -> Reply:
        length = self._table.queue_length(request.keys[0])
        item = self._table.pop(request.keys[0])
        return Reply(length, () if item is None else (item,))

    # Waiting

    def _wait(self, session: Session, request: Request) -> Reply | None:
        missing = {key for key in request.keys if key not in self._table}
        if not missing:
            return Reply(STOP_WAITING)
        session.stage = Stage.WAITING
        session.missing = missing
        for key in missing:
            self._waiters.setdefault(key, {})[session] = None
        return None

    def _barrier(self, session: Session, request: Request) -> Reply | None:
        key, world_size = request.keys[0], request.number
        arrived = self._counted(key, 1)
        self._appeared(key)
        for other in tuple(self._barriers.get(key, ())):
            if other.barrier is not None and arrived >= other.barrier[1]:
                self._wake(other, Query.BARRIER)
        if arrived >= world_size:
            return Reply(STOP_WAITING)
        session.stage = Stage.WAITING
        session.barrier = (key, world_size)
        self._barriers.setdefault(key, {})[session] = None
        return None

    def _cancel_wait(self, session: Session, request: Request) -> Reply:
        # Also where the wait has just ended: a client that cancels then reads both answers.
        self._forget(session)
        session.stage = Stage.OPEN
        return Reply(WAIT_CANCELED)

    def _appeared(self, key: bytes) -> None:
        """Wake all sessions that wait for a key that may have a value now."""
        if key in self._waiters and key in self._table:
            for session in self._waiters.pop(key):
                self._found(session, key)

    def _offer(self, key: bytes) -> None:
        """Wake the first session that waits for a queue: an item is for one."""
        waiters = self._waiters.get(key)
        if not waiters:
            return
        session = next(iter(waiters))
        _remove(self._waiters, key, session)
        session.offered = key
        self._found(session, key)

    def _settle_offer(self, session: Session, request: Request | None) -> None:
        """Wake the next for an item that its session does not take after all."""
        key, session.offered = session.offered, None
        takes = request is not None and request.query is Query.QUEUE_POP and request.keys[0] == key
        if key is not None and not takes and self._table.queue_length(key):
            self._offer(key)

    def _found(self, session: Session, key: bytes) -> None:
        session.missing.discard(key)
        if not session.missing:
            self._wake(session, Query.WAIT)

    def _wake(self, session: Session, query: Query) -> None:
        self._forget(session)
        session.stage = Stage.OPEN
        self._answer(session, query, Reply(STOP_WAITING))

    def _forget(self, session: Session) -> None:
        """Stop waiting on behalf of a session."""
        for key in session.missing:
            _remove(self._waiters, key, session)
        session.missing = set()
        if session.barrier is not None:
            _remove(self._barriers, session.barrier[0], session)
            session.barrier = None


def _remove(waiters: dict[bytes, dict[Session, None]], key: bytes, session: Session) -> None:
    those = waiters.get(key)
    if those is not None:
        those.pop(session, None)
        if not those:
            del waiters[key]
