"""Congestion control of links to near hosts: not BBR.

BBR paces its sends. If the other host answers within microseconds, the timers and small loads of pacing cost
more processor time than copying does, and messages that come one by one never fill the pipe that BBR
measures. An administrator may have chosen it with far hosts in mind; links to far hosts have it.

The kernel goes on pacing a connection that has once had BBR, even if it is changed later. So connections
begin without BBR, and get it when the other host turns out to be far.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Protocol

NEAR_US = 500
"""Hosts that can answer so soon are near."""
SETTLING_LOOKS = 20
"""So often it is looked before a host is held for far: the first answers may have come at crowded moments."""
PACED = b"bbr"
"""Prefix of the names of congestion controls that pace."""

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_NAME_BYTES = 16
_INFO_BYTES = 152
_US = struct.Struct("I")
_LEAST_RTT_AT = 148  # in `struct tcp_info` of linux/tcp.h: tcpi_min_rtt
_UNKNOWN_US = 1 << 32


class Options(Protocol):
    """The socket options to set."""

    @property
    def family(self) -> int: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...


def begin(sock: Options, near: str) -> None:
    """Start a connection with the settings for near hosts, if it would start with BBR.

    Args:
        sock: The socket before it connects; or a listener, for all connections that it accepts.
        near: The congestion control to use; if the system refuses it to this user, BBR stays.
    """
    if sock.family in _FAMILIES and _control(sock).startswith(PACED) and not near.encode().startswith(PACED):
        with suppress(OSError):  # it is unknown, or not permitted
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, near.encode())


def settle(sock: Options, looks: int) -> int:
    """See whether the other host of a connection is near, and give it BBR if not.

    Args:
        sock: The connection.
        looks: How many looks are left, this one among them.

    Returns:
        How many are left after this one; 0 if there is nothing left to do.
    """
    if sock.family not in _FAMILIES or not looks or _least_rtt_us(sock) <= NEAR_US:
        return 0
    if looks == 1 and (usual := _usual(sock.family)).startswith(PACED) and _control(sock) != usual:
        with suppress(OSError):  # it was allowed when the system chose it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, usual)
    return looks - 1


def _control(sock: Options) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).split(b"\0")[0]


def _usual(family: int) -> bytes:
    """Return the system's congestion control for new connections."""
    with socket.socket(family) as sock:
        return _control(sock)


def _least_rtt_us(sock: Options) -> int:
    """Return how soon the other host has answered at best."""
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(told) < _INFO_BYTES:  # an old kernel
        return _UNKNOWN_US
    found: int = _US.unpack_from(told, _LEAST_RTT_AT)[0]
    return found
