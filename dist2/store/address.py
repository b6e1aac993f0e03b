"""Addresses of stores: a host and a port, resolved and listened on within a time limit."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import threading

import attrs

from dist2.errors import ArgumentTypeError, InvalidUsageError, StoreConnectionError, StoreConnectTimeoutError
from dist2.runtime.deadline import Deadline
from dist2.runtime.resources import check_scarcity

_BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel cuts it to ``net.core.somaxconn``."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5

log = logging.getLogger("dist2.store")

SocketAddress = tuple[str, int] | tuple[str, int, int, int]
Resolved = tuple[socket.AddressFamily, SocketAddress]


def local_address_towards(host: str) -> str | None:
    """Return the address by which another host reaches this one; None if it is not known."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


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

    def resolve(self, deadline: Deadline) -> list[Resolved]:
        """Return the socket addresses of the host, in the resolver's order.

        Raises:
            InvalidUsageError: It can be no host's name.
            StoreConnectionError: The name has no address; may pass, where name services are slow to learn.
            StoreConnectTimeoutError: The resolver did not answer in time.
        """
        found: list[list[Resolved] | Exception] = []

        def ask() -> None:
            try:
                found.append(self._look_up())
            except Exception as error:  # noqa: BLE001 - for the thread that waits
                found.append(error)

        # The resolver takes no timeout: a late answer is left to a thread that is not joined.
        if _is_literal(self.host):
            ask()
        else:
            asker = threading.Thread(target=ask, name=f"dist2-resolve-{self.host}", daemon=True)
            asker.start()
            asker.join(deadline.remaining_s())
        if not found:
            raise StoreConnectTimeoutError(
                f"looking up host {self.host!r} timed out after {deadline.milliseconds}ms"
            )
        answer = found[0]
        if isinstance(answer, UnicodeError):
            raise InvalidUsageError(f"host {self.host!r} can be no host's name: {answer}") from answer
        if isinstance(answer, OSError):
            raise StoreConnectionError(f"host {self.host!r} cannot be looked up: {answer}") from answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _look_up(self) -> list[Resolved]:
        entries = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [(entry[0], entry[4]) for entry in entries]  # type: ignore[misc]  # TCP has no other form

    def resolve_patiently(self, deadline: Deadline) -> list[Resolved]:
        """Like `resolve`; while the name has no address yet, ask again until the deadline.

        A cluster's name service often learns a host's name only after the host's processes were started.

        Raises:
            StoreConnectTimeoutError: The name had no address in time.
        """
        failure: StoreConnectionError | None = None
        for _ in deadline.tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                return self.resolve(deadline)
            except StoreConnectionError as error:
                if failure is None:
                    log.warning("host name %r of the store does not resolve yet: %s", self.host, error)
                if failure is None or not isinstance(error, StoreConnectTimeoutError):
                    failure = error  # a timeout of the last attempt would hide the real reason
        raise StoreConnectTimeoutError(
            f"The server socket has timed out after {deadline.milliseconds}ms waiting for an address of its "
            f"host (host: {self.host}, port: {self.port}): {failure}"
        ) from failure

    def listen(self, resolved: list[Resolved]) -> socket.socket:
        """Return a socket that listens on this address and on no other; port 0 takes a free one.

        Args:
            resolved: Result of `resolve`.

        Raises:
            StoreConnectionError: The port is in use, or the address is not of this machine.
        """
        failure: OSError | None = None
        for family, address in resolved:
            try:
                listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            except OSError as error:
                check_scarcity(error, "socket")
                failure = error
                continue
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

    def take_over(self, descriptor: int) -> socket.socket:
        """Return a listening socket made of a descriptor that the caller bound to this port.

        The descriptor is taken over only where nothing is raised. Listening a second time changes nothing.

        Raises:
            InvalidUsageError: It is no bound TCP socket, or bound to another port.
        """
        if isinstance(descriptor, bool) or not isinstance(descriptor, int):
            raise ArgumentTypeError(
                f"master_listen_fd must be an int, got {descriptor!r} ({type(descriptor).__name__})"
            )
        try:
            listener = socket.socket(fileno=descriptor)
        except (OSError, ValueError) as error:  # ValueError: it is negative
            raise _no_listener(descriptor, str(error)) from error
        try:
            self._listen_on(listener, descriptor)
        except BaseException:
            listener.detach()
            raise
        return listener

    def _listen_on(self, listener: socket.socket, descriptor: int) -> None:
        if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
            raise _no_listener(descriptor, f"it is of {listener.family.name}, {listener.type.name}")
        bound = listener.getsockname()[1]
        if not bound:
            raise _no_listener(descriptor, "it is not bound")
        if self.port not in (0, bound):
            raise InvalidUsageError(
                f"listen fd {descriptor} is bound to port {bound}, expected to be bound to port {self.port}"
            )
        try:
            listener.listen(_BACKLOG)
        except OSError as error:
            raise _no_listener(descriptor, str(error)) from error
        listener.set_inheritable(False)  # else a child process would keep the port taken

    def _cannot_listen(self, failure: OSError | None) -> StoreConnectionError:
        number = failure.errno if failure is not None and failure.errno is not None else 0
        hint = {
            errno.EADDRINUSE: ": it is taken, use another port; or give the store that is there as store=",
            errno.EADDRNOTAVAIL: ": it is no address of this machine",
        }.get(number, "")
        return StoreConnectionError(
            f"The server socket has failed to listen on {self} (host: {self.host}, port: {self.port}, "
            f"name: {errno.errorcode.get(number, number)}, message: {os.strerror(number)}){hint}"
        )


def _no_listener(descriptor: int, why: str) -> InvalidUsageError:
    return InvalidUsageError(f"master_listen_fd must be a bound TCP socket, got {descriptor}: {why}")


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
