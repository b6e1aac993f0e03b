"""How links to near hosts control congestion: not by BBR.

BBR paces what is sent. Where the other host answers within microseconds, the timers and the small loads that
come of it cost more processor time than copying does, and messages that come one by one never fill the pipe
that it looks for. Whoever runs a machine may have chosen it with far hosts in mind; those keep it.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Protocol

NEAR_US = 500
"""Hosts that can answer so soon are near."""
SETTLING_LOOKS = 100
"""So often it is looked: the first answers may have come at crowded moments."""
PACED = b"bbr"
"""How the names of what paces begin."""

_NAME_BYTES = 16
_INFO_BYTES = 152
_US = struct.Struct("I")
_LEAST_RTT_AT = 148  # in `struct tcp_info` of linux/tcp.h: tcpi_min_rtt
_UNKNOWN_US = 1 << 32


class Options(Protocol):
    """What is asked of a socket."""

    @property
    def family(self) -> int: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...


def settle(sock: Options, near: str) -> bool:
    """Have a connection to a near host use another congestion control than BBR.

    Args:
        sock: The connection.
        near: Which one to use; where the system does not let this user have it, BBR stays.

    Returns:
        Whether there is nothing left to do; if not, the host may be nearer than it seemed.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    if not name.startswith(PACED) or near.encode().startswith(PACED):
        return True
    if _least_rtt_us(sock) > NEAR_US:
        return False
    with suppress(OSError):  # it is unknown, or not for everybody
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, near.encode())
    return True


def _least_rtt_us(sock: Options) -> int:
    """Return how soon the other host has answered at best."""
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(told) < _INFO_BYTES:  # an old kernel
        return _UNKNOWN_US
    found: int = _US.unpack_from(told, _LEAST_RTT_AT)[0]
    return found
