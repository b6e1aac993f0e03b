"""Stores at the end of the process and in forked children.

At exit, clients leave first; then each server goes on for as long as others are connected, `LINGER_S` at
most: rank 0 is often done first, while others still read keys. A process that dies of an exception does
not wait, so that others learn of it.

A forked child inherits descriptors and no threads. It closes the descriptors, so that a connection ends
when the parent ends it; inherited stores refuse to work.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet

from dist2.runtime.deadline import deadline_in, remaining_s
from dist2.runtime.process import AtExit, InChild, at_exit, in_child, raised

LINGER_S = 10.0
"""How long a process that ends keeps serving others that are connected, in seconds."""


class User(Protocol):
    """A user of a store's resource: a connection, an open file."""

    def close(self) -> None:
        """Leave the store."""

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors, without a message."""


class Server(Protocol):
    """A server of a store."""

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no client is connected."""

    def stop(self) -> None:
        """Stop serving."""

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors, without a message."""


_users: WeakSet[User] = WeakSet()
_servers: WeakSet[Server] = WeakSet()


def track_user(user: User) -> None:
    """Close this when the process ends, and abandon it in forked children."""
    _users.add(user)


def track_server(server: Server) -> None:
    """Let this linger and stop when the process ends, and abandon it in forked children."""
    _servers.add(server)


@at_exit(AtExit.STORES)
def _at_exit() -> None:
    with ExitStack() as steps:  # runs all, the last one that was pushed first, and raises an error after that
        steps.callback(_end_servers)
        for user in tuple(_users):
            steps.callback(user.close)


def _end_servers() -> None:
    deadline_ns = deadline_in(LINGER_S if raised() is None else 0.0)
    with ExitStack() as steps:
        for server in tuple(_servers):
            steps.callback(_end, server, deadline_ns)


def _end(server: Server, deadline_ns: int) -> None:
    try:
        server.wait_until_idle(remaining_s(deadline_ns))
    finally:
        server.stop()


@in_child(InChild.STORES)
def _abandon_in_child() -> None:
    for user in tuple(_users):
        user.abandon()
    for server in tuple(_servers):
        server.abandon()
    _users.clear()
    _servers.clear()
