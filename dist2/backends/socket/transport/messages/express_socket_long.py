"""`SocketTake`: direct receives of long messages that arrive over sockets without an announcement.

As `SocketReceive`, but the header is read alone: other frames in between (mostly credit) are handled, and the
search for the message continues. While it waits for the rest of a payload it continues writes to links that
were full: otherwise two ranks that send to each other would wait for each other.
"""

from __future__ import annotations

import ctypes
import socket
from time import monotonic_ns

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.express_socket import Buffer, SocketReceive
from dist2.backends.socket.transport.messages.streams import read_whole
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.backends.socket.wire import HEADER_BYTES
from dist2.runtime.signals import ctrl_c

_PATIENCE_NS = 5_000_000
"""Idle time after which the long path takes over."""


class SocketTake(SocketReceive):
    """Receives the long messages of a lot."""

    def _receive(self, link: Link, payload: Buffer, seq: int, deadline_ns: int) -> bool | Receiving:
        self._posted = None
        try:
            if not self._read_up_to_payload(link, seq, deadline_ns):
                return False
            came = self._read(link, ctypes.addressof(payload), self._nbytes, deadline_ns)
            with self._fabric.lock:
                self._take(link, payload, seq, HEADER_BYTES + came)
                self._staged[0] = 0
        except BaseException:  # a signal handler that raises
            self._give_up(link)
            raise
        return self._posted is None or self._posted

    def _read_up_to_payload(self, link: Link, seq: int, deadline_ns: int) -> bool:
        """Read the message's header, and process earlier frames; whether the message is next."""
        fabric, staged = self._fabric, self._staged
        header = ctypes.addressof(ctypes.c_char.from_buffer(staged))
        while True:
            staged[0] = 0
            count = self._read(link, header, HEADER_BYTES, deadline_ns)
            if count == HEADER_BYTES and staged == self._header:
                return True
            with fabric.lock:
                if count:
                    fabric.take_in(link, memoryview(staged)[:count])
                staged[0] = 0
            if count < HEADER_BYTES or self._link(seq) is not link:
                return False

    def _read(self, link: Link, address: int, nbytes: int, deadline_ns: int) -> int:
        """Read to an address as long as something comes; return how many bytes did."""
        fabric, mailbox, sock = self._fabric, self._mailbox, link.sock
        assert isinstance(sock, socket.socket)  # `_link` saw to it
        fd, came, end = sock.fileno(), 0, 0
        while True:
            count: int = read_whole(fd, address + came, nbytes - came, fabric.is_full)
            if count < 0:  # the queue finds the end as well, and handles it
                return came + ~count
            came += count
            if came == nbytes:
                return came
            now = monotonic_ns()
            if count or not end:
                end = min(now + _PATIENCE_NS, deadline_ns)
            if now >= end or mailbox.aborted is not None or mailbox.fault is not None or ctrl_c.pending:
                return came
            fabric.press()
            if fabric.poller.is_wanted():
                return came
