"""Store servers that several stores of this process share: one for an address, leased.

Without a secret the server is torch's (`TorchServer`), so that torch's own parts share it as well, whichever
came first. With a secret it is dist2's (`StoreServer`): torch's clients could not prove that they know it.
"""

from __future__ import annotations

import socket
import threading

from dist2.errors import StoreConnectionError
from dist2.runtime.deadline import Deadline
from dist2.security.authenticator import Credentials
from dist2.store.address import Address, Resolved
from dist2.store.tcp_server import StoreServer
from dist2.store.torch_server import TorchServer

Server = StoreServer | TorchServer


class Lease:
    """The right to a running server. Returning the last lease ends the server.

    A private server (`host`) ends at once, as torch's. A shared one (`share`) goes on until no client is
    connected, since other ranks may not be done; a new lease on it in the meantime keeps it.
    """

    def __init__(self, server: Server, shared_at: Address | None) -> None:
        self.server = server
        self._shared_at = shared_at
        self._given_back = False

    def give_back(self) -> None:
        """Tell that the server is not needed any more here. May be called twice."""
        with _lock:
            if self._given_back:
                return
            self._given_back = True
            if self._shared_at is not None:
                _leases[self._shared_at] -= 1
                if _leases[self._shared_at] == 0:
                    self.server.retire()
                return
        self.server.stop()

    def end(self) -> None:
        """End the server at once: all its clients have ended, and this is the only lease."""
        with _lock:
            self._given_back = True
            if self._shared_at is not None:
                _servers.pop(self._shared_at, None)
                _leases.pop(self._shared_at, None)
        self.server.stop()


# Reentrant: a destructor may give a lease back while this thread takes one.
_lock = threading.RLock()
_servers: dict[Address, Server] = {}
_leases: dict[Address, int] = {}


def host(listener: socket.socket, credentials: Credentials) -> Lease:
    """Serve on a listening socket, for one store alone."""
    return Lease(StoreServer(listener, credentials=credentials), None)


def share(address: Address, deadline: Deadline, credentials: Credentials) -> Lease:
    """Serve at an address, or join the server that this process has there.

    Raises:
        StoreConnectionError: The port is in use by others, or the address is not of this machine.
    """
    resolved = address.resolve_patiently(deadline)  # may take long, and so not under the lock
    with _lock:
        server = _servers.get(address)
        if server is not None and not server.revive():
            server.stop()  # it may still hold the port
            server = None
        if server is None:
            server = _serve(address, resolved, deadline, credentials)
            address = Address(address.host, server.port)
            _servers[address] = server
            _leases[address] = 0
        _leases[address] += 1
        return Lease(server, address)


def _serve(
    address: Address, resolved: list[Resolved], deadline: Deadline, credentials: Credentials
) -> Server:
    try:
        listener = address.listen(resolved)
    except StoreConnectionError as taken:
        if credentials.required:
            raise
        try:
            return TorchServer(resolved[0][1][0], address.port, None, deadline)
        except StoreConnectionError:  # it is no server of torch's in this process
            raise taken from taken.__cause__
    if credentials.required:
        return StoreServer(listener, credentials=credentials)
    host, port = listener.getsockname()[:2]
    return TorchServer(host, port, listener, deadline)
