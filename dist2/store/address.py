"""Addresses of stores: a host and a port, resolved and listened on within a time limit."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading

import attrs

from dist2.errors import InvalidUsageError, StoreConnectionError, StoreConnectTimeoutError
from dist2.store.deadline import Deadline

_BACKLOG = 4096
"""How many ranks may come at once; the kernel cuts it to ``net.core.somaxconn``."""

SocketAddress = tuple[str, int] | tuple[str, int, int, int]


@attrs.frozen
class Address:
    """Where a store is: a name or literal address, and a port."""

    host: str
    port: int

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise InvalidUsageError(f"host_name must be a non-empty str, got {self.host!r}")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 1 << 16:
            raise InvalidUsageError(f"port must be an int from 0 to 65535, got {self.port!r}")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def resolve(self, deadline: Deadline) -> list[tuple[socket.AddressFamily, SocketAddress]]:
        """Return the socket addresses of the host, in the resolver's order.

        Raises:
            StoreConnectionError: The name has no address; may pass, where name services are slow to learn.
            StoreConnectTimeoutError: The resolver did not answer in time.
        """
        if _is_literal(self.host):
            return self._look_up()
        found: list[list[tuple[socket.AddressFamily, SocketAddress]] | OSError] = []

        def ask() -> None:
            try:
                found.append(self._look_up())
            except OSError as error:
                found.append(error)

        # The resolver takes no timeout: what comes too late is left to a thread that nobody waits for.
        asker = threading.Thread(target=ask, name=f"dist2-resolve-{self.host}", daemon=True)
        asker.start()
        asker.join(deadline.remaining_s())
        if not found:
            raise StoreConnectTimeoutError(
                f"looking up host {self.host!r} timed out after {deadline.milliseconds}ms"
            )
        if isinstance(found[0], OSError):
            raise StoreConnectionError(f"host {self.host!r} cannot be looked up: {found[0]}") from found[0]
        return found[0]

    def _look_up(self) -> list[tuple[socket.AddressFamily, SocketAddress]]:
        entries = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [(entry[0], entry[4]) for entry in entries]  # type: ignore[misc]  # TCP has no other form

    def listen(self, deadline: Deadline) -> socket.socket:
        """Return a socket that listens on this address and on no other; port 0 takes a free one.

        Raises:
            StoreConnectionError: The port is in use, or the address is not of this machine.
        """
        failure: OSError | None = None
        for family, address in self.resolve(deadline):
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
            except OSError as error:
                listener.close()
                failure = error
            else:
                return listener
        raise self._cannot_listen(failure) from failure

    def _cannot_listen(self, failure: OSError | None) -> StoreConnectionError:
        number = failure.errno if failure is not None and failure.errno is not None else 0
        hint = {
            errno.EADDRINUSE: ": it is taken, use another port",
            errno.EADDRNOTAVAIL: ": it is no address of this machine",
        }.get(number, "")
        return StoreConnectionError(
            f"The server socket has failed to listen on {self} (host: {self.host}, port: {self.port}, "
            f"name: {errno.errorcode.get(number, number)}, message: {os.strerror(number)}){hint}"
        )


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
