"""`TCPStore`: keys on one server, for ranks on many hosts; speaks the protocol of torch's store."""

from __future__ import annotations

import threading
from datetime import timedelta

from dist2.errors import ArgumentTypeError, InvalidUsageError, QueueEmptyError, StoreTimeoutError
from dist2.runtime.arguments import as_int
from dist2.runtime.config import Config, environment_value
from dist2.runtime.deadline import Deadline
from dist2.security.authenticator import Credentials
from dist2.store import shared_server
from dist2.store.address import Address
from dist2.store.base import DEFAULT_TIMEOUT, Store, barrier_timed_out
from dist2.store.client import StoreClient
from dist2.store.protocol import DEFAULT_LIMITS, READY, SENT_VALUE_BYTES, Query, Reply, Request
from dist2.store.shared_server import Lease
from dist2.store.text import as_name

_MEMBERS = b"init/"
"""Counts the members that have arrived; torch's name for it."""

_SPACE = b"/"
"""torch's prefix of users' keys, which keeps them apart from its own keys."""

_POLL_S = 0.01


class TCPStore(Store):
    """A store on a server, which one of the ranks hosts. Interchangeable with torch's, in both roles.

    Args:
        host_name: Where the server is. The master binds this address and no other.
        port: Its port. The master may give 0 and read the one it got from `port`.
        world_size: How many stores will join, the master's included; None if that is not known.
        is_master: Whether to host the server. Under torchrun, whose agent already serves at
            ``MASTER_ADDR:MASTER_PORT``, a store for that address only joins.
        timeout: Limit of connecting and of each call: a `timedelta` or seconds.
        wait_for_workers: Whether the master waits here until ``world_size`` stores have joined.
        multi_tenant: Whether stores of this process for the same address share one server, which then
            runs until no client is connected. Otherwise it ends with the store that hosts it.
        master_listen_fd: A bound TCP socket that the server takes over instead of binding one; it need not
            listen yet.
        use_libuv: Accepted for torch's sake: it selects between torch's servers.

    Attributes:
        host: As given.
        port: The server's.
        libuvBackend: As given.

    Raises:
        InvalidUsageError: An argument is wrong.
        StoreConnectionError: The port is in use, or the address is not of this machine.
        StoreConnectTimeoutError: No server answered in time, or the master's host name had no address.
        StoreTimeoutError: Not all stores joined in time.
        AuthenticationError: The server is not let in by this process, or does not let it in.

    Examples:
        >>> server = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        >>> client = dist2.TCPStore("127.0.0.1", server.port)
        >>> client.set("key", "value")
        >>> server.get("key")
        b'value'
        >>> client.close(), server.close()
        (None, None)
    """

    _link: _Link | None = None

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        super().__init__(timeout)
        self._use_libuv = bool(use_libuv)
        address = Address(host_name, port)
        members = None if world_size is None else as_int(world_size)
        if members is None and world_size is not None:
            raise ArgumentTypeError(
                f"world_size must be an int or None, got {world_size!r} ({type(world_size).__name__})"
            )
        if members == 0:
            raise InvalidUsageError("TCPStore world size cannot be 0")
        if not is_master and not address.port:
            raise InvalidUsageError("port must be from 1 to 65535 for a store that joins a server, got 0")
        deadline = self._deadline()
        lease = None
        # An agent's store is torch's: it knows no secret, and its content is not trusted.
        agents = _is_agents(address)
        config = Config.from_environment()
        credentials = Credentials() if agents else Credentials.of(config)
        if is_master and not agents:
            lease = _lease(address, deadline, multi_tenant, master_listen_fd, credentials)
            address = Address(host_name, lease.server.port)
        try:
            self._link = _Link(StoreClient(address, deadline, credentials, config.heartbeat_s), lease)
        except BaseException:
            if lease is not None:
                lease.give_back()
            raise
        if wait_for_workers and members is not None and members > 0:
            try:
                self._join(members, lease is not None, deadline)
            except BaseException:
                self.close()
                raise

    @property
    def host(self) -> str:
        """The host name that was given."""
        return self._required_link().client.address.host

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._required_link().client.address.port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802 - torch's name
        """The value of ``use_libuv``. It has no effect: dist2 has its own server."""
        return self._use_libuv

    def __repr__(self) -> str:
        link = self._link
        if link is None:
            return "TCPStore(closed)"
        role = "none here" if link.lease is None else f"port {link.lease.server.port}"
        return f"TCPStore({link.client.address}, server={role})"

    def clone(self) -> TCPStore:
        """Return another store over the same connections, with a separate timeout."""
        other = TCPStore.__new__(TCPStore)
        Store.__init__(other, self.timeout)
        other._use_libuv = self._use_libuv
        other._link = self._required_link().share()
        return other

    def _release(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.leave()

    def _required_link(self) -> _Link:
        self._require_open()
        assert self._link is not None  # an open store has one
        return self._link

    def note_server(self, words: str) -> None:
        """Note the server's process, for the error of a lost connection."""
        self._required_link().client.server = words

    def _join(self, world_size: int, hosts: bool, deadline: Deadline) -> None:
        """Count oneself; the host of the server waits for the others."""
        came = self._ask(Request(Query.ADD, (_MEMBERS,), number=1), deadline).number
        while hosts and came < world_size:
            if deadline.passed:
                raise StoreTimeoutError(
                    f"Timed out after {deadline.timeout_s:g} seconds waiting for clients. "
                    f"{came}/{world_size} clients joined."
                )
            deadline.pause(_POLL_S)
            came = self._ask(Request(Query.ADD, (_MEMBERS,)), deadline.stretched()).number

    def _ask(self, request: Request, deadline: Deadline | None = None) -> Reply:
        return self._required_link().client.ask(request, deadline or self._deadline())

    def _set(self, key: bytes, value: bytes) -> None:
        self._ask(Request(Query.SET, (_spaced(key),), (_bounded(value),)))

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        self._wait((key,), deadline)
        return self._fetch((key,), deadline)[0]

    def _add(self, key: bytes, amount: int) -> int:
        return self._ask(Request(Query.ADD, (_spaced(key),), number=amount)).number

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        values = (_bounded(expected), _bounded(desired))
        return self._ask(Request(Query.COMPARE_SET, (_spaced(key),), values)).values[0]

    def _append(self, key: bytes, value: bytes) -> None:
        self._ask(Request(Query.APPEND, (_spaced(key),), (_bounded(value),)))

    def _delete(self, key: bytes) -> bool:
        return bool(self._ask(Request(Query.DELETE_KEY, (_spaced(key),))).number)

    def _num_keys(self) -> int:
        return self._ask(Request(Query.GETNUMKEYS)).number

    def _list_keys(self) -> list[bytes]:
        names = self._ask(Request(Query.LIST_KEYS)).values
        return [name[len(_SPACE) :] for name in names if name.startswith(_SPACE)]

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        return self._ask(Request(Query.CHECK, tuple(map(_spaced, keys)))).number == READY

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        spaced = tuple(map(_spaced, keys))
        if not self._required_link().client.wait(Request(Query.WAIT, spaced), deadline):
            names = ", ".join(map(as_name, spaced))
            raise StoreTimeoutError(f"wait timeout after {deadline.milliseconds}ms, keys: {names}")

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        self._wait(keys, deadline)
        return self._fetch(keys, deadline) if keys else []

    def _fetch(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        query = Query.GET if len(keys) == 1 else Query.MULTI_GET
        return list(self._ask(Request(query, tuple(map(_spaced, keys))), deadline.stretched()).values)

    def _multi_set(self, keys: tuple[bytes, ...], values: tuple[bytes, ...]) -> None:
        self._ask(Request(Query.MULTI_SET, tuple(map(_spaced, keys)), tuple(map(_bounded, values))))

    def _barrier(self, key: bytes, world_size: int, deadline: Deadline) -> None:
        request = Request(Query.BARRIER, (_spaced(key),), number=world_size)
        if not self._required_link().client.wait(request, deadline):
            why = f"barrier timeout after {deadline.milliseconds}ms, key: {as_name(key)}"
            raise barrier_timed_out(key, self._add(key, 0), world_size, why)

    def _push(self, key: bytes, value: bytes) -> None:
        self._ask(Request(Query.QUEUE_PUSH, (_spaced(key),), (_bounded(value),)))

    def _pop(self, key: bytes, deadline: Deadline | None) -> bytes:
        while True:
            if deadline is not None:
                self._wait((key,), deadline)
            limit = None if deadline is None else deadline.stretched()
            items = self._ask(Request(Query.QUEUE_POP, (_spaced(key),)), limit).values
            if items:
                return items[0]
            if deadline is None:
                raise QueueEmptyError(f"queue is empty: {as_name(key)}")
            if deadline.passed:
                raise StoreTimeoutError(
                    f"queue_pop timeout after {deadline.milliseconds}ms, key: {as_name(key)}"
                )
            # Another took the item between the two steps, or a key of that name ended the wait.
            deadline.pause(_POLL_S)

    def _queue_length(self, key: bytes) -> int:
        return self._ask(Request(Query.QUEUE_LEN, (_spaced(key),))).number


class _Link:
    """State that a store and its clones share: the client and, on the master, a lease of the server."""

    def __init__(self, client: StoreClient, lease: Lease | None) -> None:
        self.client = client
        self.lease = lease
        self._stores = 1
        self._lock = threading.RLock()  # a destructor may leave while this thread shares

    def share(self) -> _Link:
        with self._lock:
            self._stores += 1
        return self

    def leave(self) -> None:
        with self._lock:
            self._stores -= 1
            if self._stores:
                return
        try:
            self.client.close()
        finally:
            if self.lease is not None:
                self.lease.give_back()


def _lease(
    address: Address,
    deadline: Deadline,
    multi_tenant: bool,
    listen_fd: int | None,
    credentials: Credentials,
) -> Lease:
    if listen_fd is not None:
        return shared_server.host(address.take_over(listen_fd), credentials)
    if multi_tenant:
        return shared_server.share(address, deadline, credentials)
    return shared_server.host(address.listen(address.resolve_patiently(deadline)), credentials)


def _is_agents(address: Address) -> bool:
    """Whether a torchrun agent serves there, so that a rank must not."""
    if environment_value("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    theirs = (environment_value("MASTER_ADDR"), environment_value("MASTER_PORT"))
    return theirs in ((None, None), (address.host, str(address.port)))


def _spaced(key: bytes) -> bytes:
    """Return a key as it is on the wire."""
    if len(key) >= DEFAULT_LIMITS.key_bytes:
        raise InvalidUsageError(f"key must be shorter than {DEFAULT_LIMITS.key_bytes} bytes, got {len(key)}")
    return _SPACE + key


def _bounded(value: bytes) -> bytes:
    if len(value) > SENT_VALUE_BYTES:
        raise InvalidUsageError(
            f"value must have at most {SENT_VALUE_BYTES} bytes, got {len(value)}: split it"
        )
    return value
