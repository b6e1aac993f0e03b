"""Addresses: from where one can be reached, and how one is written."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def is_loopback(host: str) -> bool:
    """Whether an address is of this host alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def peer_name(address: Sequence[object] | None) -> str:
    """Return who is at the other end of a connection, as a refusal names them."""
    return "somebody" if address is None else "{}:{}".format(*address[:2])
