"""Choose the address of this machine that the data listener binds."""

from __future__ import annotations

import ipaddress
import socket

from torch.distributed import Store

from dist2.store.base import without_prefixes

LOOPBACK = "127.0.0.1"


def data_host(store: Store) -> str:
    """Return the local address that routes to the store's host; loopback where the store is local.

    Ranks on other hosts can come only if the store is not on loopback; then they reach this rank by the
    address that this rank reaches the store by.
    """
    host = _host_of(store)
    if host is None:
        return LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            local = str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
    return LOOPBACK if ipaddress.ip_address(local).is_loopback else local


def _host_of(store: Store) -> str | None:
    """Return the host of the TCP store behind any prefixes; None where it is another kind."""
    host = getattr(without_prefixes(store), "host", None)
    return host if isinstance(host, str) and host else None
