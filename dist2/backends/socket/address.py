"""Choose the address of this machine that the data listener binds."""

from __future__ import annotations

import ipaddress

from torch.distributed import Store

from dist2.store.address import local_address_towards
from dist2.store.base import without_prefixes

LOOPBACK = "127.0.0.1"


def data_host(store: Store) -> str:
    """Return the local address that routes to the store's host; loopback where the store is local.

    Ranks on other hosts can come only if the store is not on loopback; then they reach this rank by the
    address that this rank reaches the store by.
    """
    host = _host_of(store)
    local = None if host is None else local_address_towards(host)
    return LOOPBACK if local is None or ipaddress.ip_address(local).is_loopback else local


def _host_of(store: Store) -> str | None:
    """Return the host of the TCP store behind any prefixes; None where it is another kind."""
    host = getattr(without_prefixes(store), "host", None)
    return host if isinstance(host, str) and host else None
