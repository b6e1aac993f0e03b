"""Endpoints at which ranks can meet: a server and a file."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import attrs

from dist2.store.base import Store
from dist2.store.file import FileStore
from dist2.store.tcp import TCPStore


class Endpoint(Protocol):
    """A place where ranks meet. Equal endpoints are the same place."""

    def __hash__(self) -> int: ...

    def __str__(self) -> str:
        """Name it, for messages."""

    @property
    def ends_with_rank_0(self) -> bool:
        """Whether the store lives no longer than the process of rank 0."""

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the store there; rank 0 may have to make it."""


@attrs.frozen
class ServerEndpoint:
    """A store server's address; rank 0 hosts it, unless another process does.

    Attributes:
        host: Name or address.
        port: Its port.
        hosted: Whether another process hosts the server.
        label: The name used in messages.
    """

    host: str
    port: int
    hosted: bool
    label: str = attrs.field(eq=False)

    def __str__(self) -> str:
        return self.label

    @property
    def ends_with_rank_0(self) -> bool:
        """Whether rank 0 serves."""
        return not self.hosted

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Join the server; as rank 0, host it if need be."""
        hosts = rank == 0 and not self.hosted
        return TCPStore(self.host, self.port, None, hosts, timeout, wait_for_workers=False, multi_tenant=True)


@attrs.frozen
class FileEndpoint:
    """A file that ranks share.

    Attributes:
        path: The file.
        label: The name used in messages.
    """

    path: str
    label: str = attrs.field(eq=False)

    def __str__(self) -> str:
        return self.label

    @property
    def ends_with_rank_0(self) -> bool:
        """No: a file stays."""
        return False

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Open the file, or make it."""
        return FileStore(self.path, world_size, timeout)
