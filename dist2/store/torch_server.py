"""`TorchServer`: torch's own store server, where ranks meet without a secret.

One address can serve a whole process only if torch's parts can use the server too. torch shares its servers
inside a process: a ``TCPStore`` with ``multi_tenant=True``, which is how ``init_process_group`` and
``init_rpc`` open theirs, takes the server that the process has at this port before it tries to bind. And
torch's C++ holds the GIL while parts of it talk to the store (``init_rpc`` does), so a server in Python could
not answer them in the same process. So the server is torch's, on a socket that dist2 has bound: torch itself
would listen on all interfaces.

torch's server ends with the last store in this process that uses it, though other processes may be connected.
So `TorchServer` keeps one such store until no other client is connected, as `StoreServer` does.
Clients are counted by the connections of this process at the port: the kernel's tables list those of the
whole host, and take seconds where these are many. One that connects between the
last count and the end would be cut off in its first requests, and ranks that meet again do connect at any
time. So before the last count the kernel is told to drop packets for new connections: a client sends its
request for one again after a second, and the server is gone then, or goes on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import stat
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed

from dist2.errors import StoreConnectionError
from dist2.runtime.deadline import Deadline
from dist2.runtime.resources import system_call
from dist2.store import lifetime

_SHORTEST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_IDLE_PAUSE_S, _IDLE_LOOKS = 0.04, 4
_FOREVER = timedelta(days=10_000)
_LISTENING = 10
_DESCRIPTORS = Path("/proc/self/fd")
_TCP_INFO = struct.Struct("B23xI")
"""Of the answer to TCP_INFO: the state; of a listening socket, how many connections are to be accepted."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of packets: the instruction that returns 0, the number of bytes to keep."""
_TCP = (socket.AF_INET, socket.AF_INET6)
_NEEDED = 12
"""Descriptors that torch's server and its first client take, and a look into the kernel's tables."""
_NO_SOCKET = -1
"""In place of a descriptor: only a server that is there already can be used then."""


class TorchServer:
    """Keeps a server of torch's running in this process, until `stop`.

    Args:
        host: Where it listens: an address, or a name.
        port: The port.
        listener: A bound, listening socket, which it takes over; None for the server that torch has there.
        deadline: When to give up connecting to it.

    Attributes:
        port: The port it listens on.

    Raises:
        StoreConnectionError: This process has no server of torch's at the port.
        ResourceError: It has too few descriptors left for one.
    """

    def __init__(self, host: str, port: int, listener: socket.socket | None, deadline: Deadline) -> None:
        self.port = port
        _check_descriptors()
        descriptor = _NO_SOCKET if listener is None else listener.detach()
        left_s = deadline.remaining_s()
        try:
            self._store: torch.distributed.TCPStore | None = torch.distributed.TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(days=1) if left_s is None else timedelta(seconds=max(left_s, 0.001)),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=descriptor,
            )
        except RuntimeError as error:  # torch.distributed.DistNetworkError, DistStoreError
            raise StoreConnectionError(
                f"torch has no store server at {host}, port {port}: {error}"
            ) from error
        self._lock = threading.Lock()
        self._retired = False
        _servers.add(self)
        lifetime.track_server(self)

    @property
    def connections(self) -> int:
        """How many clients are connected, without the stores that keep servers running.

        Raises:
            OSError: This process lacks descriptors to find out.
        """
        keepers = [each for each in tuple(_servers) if each.port == self.port and each._store is not None]
        peers, _, waiting = _accepted_at(self.port)
        return max(0, len(peers) + waiting - len(keepers))

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no client of another process is connected; False at the deadline.

        Those of this process are torch's own parts: dist2's have been closed before.
        """
        for _ in Deadline.after(timedelta(seconds=max(timeout_s, 0.001))).tries(
            _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S
        ):
            with suppress(OSError):  # without descriptors this cannot be known
                peers, own, waiting = _accepted_at(self.port)
                if self._store is None or not (peers - own or waiting):
                    return True
        return False

    def stop(self) -> None:
        """Let go of the server, which ends unless torch's own parts use it. May be called twice."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        """Under the lock, so that the port is free when another thread finds the store gone."""
        self._store = None  # its destructor ends the server

    def retire(self) -> None:
        """Stop as soon as no client is connected: until then others may need the keys."""
        with self._lock:
            self._retired = True
        threading.Thread(target=self._stop_when_idle, name=f"dist2-store-{self.port}", daemon=True).start()

    def revive(self) -> bool:
        """Take back `retire`; False if the server has ended."""
        with self._lock:
            self._retired = False
            return self._store is not None

    def abandon(self) -> None:
        """In a forked child: close the descriptors it inherited, so that connections end with the parent.

        The store is kept for good: its destructor would wait for a thread that only the parent has.
        """
        self._lock = threading.Lock()
        if self._store is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
            self._store = None
            with suppress(OSError):  # without descriptors they cannot be found
                for descriptor in _sockets_at(self.port):
                    os.close(descriptor)

    def _stop_when_idle(self) -> None:
        """Let go when no client was connected for a moment: ranks may meet again within milliseconds."""
        idle = 0
        for _ in Deadline.after(_FOREVER).tries(_IDLE_PAUSE_S, _LONGEST_PAUSE_S):
            with self._lock:
                idle = idle + 1 if self._is_idle() else 0
                if self._retired and idle >= _IDLE_LOOKS:
                    with suppress(OSError), _no_new_connections(self.port):
                        idle = idle if self._is_idle() else 0
                        if idle:
                            self._let_go()
                if not self._retired or self._store is None:
                    return

    def _is_idle(self) -> bool:
        try:
            return not self.connections
        except OSError:  # without descriptors this cannot be known
            return False


def _check_descriptors() -> None:
    """Check that torch can open what it needs: it would try to connect until its deadline, or give no reason.

    Raises:
        ResourceError: It cannot.
    """
    held: list[int] = []
    try:
        with system_call(f"opening {_NEEDED} descriptors for the store server"):
            while len(held) < _NEEDED:
                held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in held:
            os.close(descriptor)


def _accepted_at(port: int) -> tuple[set[str], set[str], int]:
    """Return the peers of the connections that this process has accepted at a port, its own ends of all
    connections, and the number of those at the port that it has yet to accept.
    """
    waiting, peers, own = 0, set(), set()
    for _, copy in _tcp_sockets():
        state, number = _TCP_INFO.unpack(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        if state == _LISTENING and copy.getsockname()[1] == port:
            waiting += number
    for _, copy in _tcp_sockets():  # once more: it may have accepted one of them in between
        with suppress(OSError):  # it has ended meanwhile
            peer, end = copy.getpeername(), copy.getsockname()
            own.add(_end(end))
            if end[1] == port:
                peers.add(_end(peer))
    return peers, own, waiting


@contextmanager
def _no_new_connections(port: int) -> Iterator[None]:
    """Have the kernel drop packets for new connections to a port of this process meanwhile, where it can."""
    held = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(held))
    listening = []
    for descriptor in _sockets_at(port):
        with suppress(OSError):  # closed meanwhile, or no filters here
            copy = socket.socket(fileno=os.dup(descriptor))
            listening.append(copy)
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    try:
        yield
    finally:
        for copy in listening:
            with copy, suppress(OSError):  # it has none
                copy.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _sockets_at(port: int) -> list[int]:
    """Return the descriptors of TCP sockets of this process that are bound to a port."""
    return [descriptor for descriptor, copy in _tcp_sockets() if copy.getsockname()[1] == port]


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptor of each TCP socket of this process, with a copy that is closed afterwards."""
    for descriptor in _descriptors():
        try:
            # Of a pipe, say, `socket` would not take the copy, which would stay open.
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.type == socket.SOCK_STREAM and copy.family in _TCP:
                        yield descriptor, copy
        except OSError as error:  # the descriptor that lists the folder is closed
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise


def _descriptors() -> Iterable[int]:
    """Return the numbers that the descriptors of this process may have."""
    try:
        return [int(entry.name) for entry in _DESCRIPTORS.iterdir()]
    except FileNotFoundError:  # no /proc in this sandbox
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096))


def _end(address: tuple[Any, ...]) -> str:
    """Return an end of a connection in one form, though a socket of IPv6 has addresses of IPv4 longer."""
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"


_servers: WeakSet[TorchServer] = WeakSet()
