# cython: annotation_typing=False
"""`Rounds`: one round of progress over all links of a process."""

from __future__ import annotations

import select
from time import monotonic_ns

from dist2.backends.socket.transport.alarm import Alarm
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import GRACE_S, Presence
from dist2.backends.socket.transport.links.reception import Reception
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.departures import Departures
from dist2.runtime.built import check_built
from dist2.runtime.lock import Lock

check_built(__name__, __file__)

BUSY_ROUNDS = 16
"""All descriptors have their turn as often, in rounds, while rings or a link are never empty."""
IDLE_NS = 1_000_000
"""A shorter sleep, between two pieces of a message say, is no wait for another rank."""


class Rounds:
    """Reads arrived frames and writes queued ones; by one thread at a time: see `Poller`.

    Args:
        lock: The fabric's lock.
        epoll: Polls all descriptors.
        alarm: In it.
        linkage: The links there are.
        presence: Which processes are there.
        reception: Accepts connections.
        courier: Sends frames again that lacked a link.
        departures: Handles members that are gone.

    Attributes:
        idle_ns: For how long rounds have slept, where a sleep took `IDLE_NS` or longer.
    """

    def __init__(
        self,
        lock: Lock,
        epoll: select.epoll,
        alarm: Alarm,
        linkage: Linkage,
        presence: Presence,
        reception: Reception,
        courier: Courier,
        departures: Departures,
    ) -> None:
        self._lock = lock
        self._epoll = epoll
        self._alarm = alarm
        self.linkage = linkage
        self._presence = presence
        self._reception = reception
        self._courier = courier
        self._departures = departures
        self._busy = 0
        self.idle_ns = 0

    def make(self, timeout_s: float) -> None:
        """Make one round: sleep until an event or the limit."""
        linkage = self.linkage
        if self._serve_busy(timeout_s > 0):
            self._busy += 1
            if self._busy % BUSY_ROUNDS:
                return
            timeout_s = 0  # the caller may wait for a moved message, and no ring wakes it
        else:
            self._busy = 0
        events = self._poll(timeout_s)
        with self._lock:
            if timeout_s > 0:
                linkage.rings.doze(False)
            linkage.gathers = True
            try:
                for fd, event in events:
                    self._serve(fd, event)
            finally:
                linkage.gathers = False
            if self._courier.put_off:
                self._courier.retry()
            self._departures.resolve()
            self._reception.sweep()
            linkage.flush_all()

    def _poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Return the descriptors that something has happened to, asleep until then or for so long."""
        if timeout_s <= 0:
            return self._epoll.poll(0)
        since_ns = monotonic_ns()
        try:
            looks_soon = self._presence.suspects or self._reception.acceptor.paused
            return self._epoll.poll(min(timeout_s, GRACE_S) if looks_soon else timeout_s)
        finally:
            slept_ns = monotonic_ns() - since_ns
            if slept_ns >= IDLE_NS:
                self.idle_ns += slept_ns

    def _serve_busy(self, sleepy: bool) -> bool:
        """Move bytes of rings, or of the link that some came through last; return whether there were some.

        If rings are empty and the caller is about to sleep, request wake-ups.
        """
        linkage = self.linkage
        with self._lock:
            moved = linkage.move_rings() or linkage.read_recent()
            if not moved and sleepy and linkage.rings.links:
                linkage.rings.doze(True)
                moved = linkage.move_rings()
                if moved:
                    linkage.rings.doze(False)
            return moved

    def _serve(self, fd: int, event: int) -> None:
        link = self.linkage.links.get(fd)
        if link is not None:
            self.linkage.serve(link, event)
        elif fd in self._reception:
            self._reception.serve(fd)
        elif self._alarm.answers(fd):
            self._reception.take_in_adopted()
        elif fd in self._presence:
            self._presence.ended(fd)
