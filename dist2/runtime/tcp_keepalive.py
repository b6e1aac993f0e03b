"""Whether the host at the other end of a connection is there: asked of the kernels, so a process that
computes or is stopped answers as well.

Source: tcp(7).
"""

from __future__ import annotations

import socket
import struct

SILENT_LOOKS = 3
"""Consecutive silent looks before the host counts as gone: an answer may be under way after the first."""
_ESTABLISHED = 1
_MOST_S, _MOST_PROBES = 32767, 127
"""Longer the kernel does not let a connection be idle, and it asks no more often."""
_INFO = struct.Struct("<BBBB48xII")  # state, _, retransmits, probes, ..., last_data_recv, last_ack_recv


def keep_alive(sock: socket.socket, heartbeat_s: float) -> None:
    """Have an idle connection end once the other host has not answered for so long."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    step = min(max(1, int(heartbeat_s / 5)), _MOST_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, step)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, step)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(max(1, int(heartbeat_s / step) - 1), _MOST_PROBES)
    )


def is_silent(sock: socket.socket, heartbeat_s: float) -> bool:
    """Whether a connection has sent something that was not answered, and has heard nothing for so long.

    ``TCP_USER_TIMEOUT`` would not do: it also ends connections whose receiver is alive but does not read.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    state, _, retransmits, probes, data_ms, ack_ms = _INFO.unpack(info)
    unanswered = bool(retransmits or probes)
    return state == _ESTABLISHED and unanswered and min(data_ms, ack_ms) > heartbeat_s * 1000
