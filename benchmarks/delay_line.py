"""A wire with a delay, for kernels without netem: frames between tap interfaces, handed on later.

    python benchmarks/delay_line.py SECONDS PID PID [PID ...]

Makes an interface in the network namespace of each process and carries frames between them by address, each
with the given delay, until its standard input ends. For latencies, not for bandwidth: a
frame costs some tens of microseconds.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

from namespaces import INTERFACE

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_FRAME_BYTES = 65536
_SPIN_S = 0.0003


def tap_in(pid: int) -> int:
    """Return the descriptor of a new interface in a process's network namespace."""
    import ctypes

    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


class Switch:
    """Knows which interface a frame goes to."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._known: dict[bytes, int] = {}

    def ways(self, came_by: int, frame: bytes) -> list[int]:
        """Return the interfaces that a frame goes to: all others until its receiver has sent something."""
        receiver, sender = frame[:6], frame[6:12]
        self._known[sender] = came_by
        if receiver in self._known:
            return [self._known[receiver]]
        return [each for each in self._ends if each != came_by]


def carry(ends: Sequence[int], delay_s: float) -> None:
    """Carry frames all ways until standard input ends."""
    late: deque[tuple[float, int, bytes]] = deque()
    switch, poll = Switch(ends), select.poll()
    for descriptor in (*ends, 0):
        poll.register(descriptor, select.POLLIN)
    while True:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, to, frame = late.popleft()
            try:
                os.write(to, frame)
            except OSError:  # the interface is down, or its queue full: a wire loses such frames
                continue
        # Sleep up to shortly before the next frame is due, then look: a sleep ends late.
        left_s = late[0][0] - now - _SPIN_S if late else 1.0
        for descriptor, _ in poll.poll(max(0.0, left_s * 1000)):
            if descriptor == 0:
                return
            try:
                while True:
                    frame, due = os.read(descriptor, _FRAME_BYTES), time.monotonic() + delay_s
                    late += [(due, to, frame) for to in switch.ways(descriptor, frame)]
            except BlockingIOError:
                continue


if __name__ == "__main__":
    taps = [tap_in(int(pid)) for pid in sys.argv[2:]]
    print("ready", flush=True)
    carry(taps, float(sys.argv[1]))
