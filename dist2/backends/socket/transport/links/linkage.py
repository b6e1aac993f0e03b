# cython: annotation_typing=False
"""`Linkage`: the links of one process, written to, read and dropped. The fabric's lock guards it."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from dist2.backends.socket.transport.links.link import Link, LinkOwner, LinkStream
from dist2.backends.socket.transport.links.pacing import settle
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.links.ring import RingWriter
from dist2.backends.socket.transport.links.rings import Rings
from dist2.errors import AuthenticationError, ResourceError, WireError
from dist2.runtime.built import check_built
from dist2.runtime.resources import is_shortage, shortage
from dist2.runtime.tcp_keepalive import SILENT_LOOKS, is_silent
from dist2.security.handshake import explanation
from dist2.security.tls import TlsStream, socket_below

check_built(__name__, __file__)

log = logging.getLogger("dist2.fabric")

_LATELY_NS = 2_000_000_000
"""A refused call is tried again at least once a second while a thread waits."""


class LinkageOwner(LinkOwner, Protocol):
    """Events that the links of a process report. All under the fabric's lock."""

    def greet(self, link: Link) -> None:
        """A link to a process exists: send it the notices that were deferred."""

    def link_is_gone(self, link: Link) -> None:
        """A link has closed."""

    def refused(self, fabric_id: str, error: AuthenticationError) -> None:
        """A process refuses this one, or fails authentication."""


class TlsLink(Link):
    """A link over a `TlsStream`, which may hold decrypted bytes that a poll does not report."""

    def read(self) -> bool:
        """Do as `Link.read`, until no such bytes are left."""
        came = super().read()
        while isinstance(self.sock, TlsStream) and self.sock.pending():
            super().read()
        return came


class Linkage:
    """Links of one process.

    Args:
        epoll: Polls their descriptors.
        presence: Notified of processes with ended links.
        linked: Called for each new link.
        heartbeat_s: How long a host may be silent before its processes count as dead, in seconds.

    Attributes:
        links: All of them, by descriptor.
        outgoing: The link for messages to a process, by its fabric id.
        entering: Links in a handshake, and the function that continues it.
        rings: The links with frames in shared memory.
        recent: The link that something came through last.
        gathers: Whether short frames are collected, and sent together once all arrived frames were read.
        congestion: The first congestion control of links if the system's is BBR: see `pacing`.
    """

    def __init__(
        self, epoll: select.epoll, presence: Presence, linked: Callable[[], None], heartbeat_s: float
    ) -> None:
        self.links: dict[int, Link] = {}
        self.outgoing: dict[str, Link] = {}
        self.entering: dict[Link, Callable[[Link], None]] = {}
        self.rings = Rings()
        self.recent: Link | None = None
        self.gathers = False
        self.congestion = "reno"
        self._epoll = epoll
        self._presence = presence
        self._linked = linked
        self._heartbeat_s = heartbeat_s
        self._shortage: ResourceError | None = None
        self._short_at_ns = 0
        self._logged_shortages: set[int | None] = set()

    def report_to(self, owner: LinkageOwner) -> None:
        """Set the receiver of events; once, before the first link."""
        self._owner = owner

    # Links

    def add(self, stream: LinkStream, peer_id: str, encrypted: bool = False) -> Link:
        """Make a link of a connection to a process."""
        link = (TlsLink if encrypted else Link)(self._owner, stream, peer_id)
        self.links[link.fileno()] = link
        self._epoll.register(link.fileno(), select.EPOLLIN)
        self._linked()
        return link

    def greet(self, link: Link) -> None:
        """Send a process the notices that were deferred until there was a link to it."""
        self._owner.greet(link)

    def to(self, fabric_id: str) -> list[Link]:
        """Return all links to a process: two, if both have connected at once."""
        return [link for link in self.links.values() if link.peer_id == fabric_id]

    def remove(self, link: Link) -> None:
        """Close a link, if it is not closed."""
        fd, peer_id = link.fileno(), link.peer_id or ""
        if self.links.pop(fd, None) is None:
            return
        self.entering.pop(link, None)
        self.rings.forget(link)
        self._epoll.unregister(fd)
        if self.recent is link:
            self.recent = None
        if self.outgoing.get(peer_id) is link:
            del self.outgoing[peer_id]
        self._owner.link_is_gone(link)
        link.close()

    def hang_up(self, link: Link, error: BaseException | str = "") -> None:
        """Drop a link whose other side is gone, or that has lost bytes.

        Args:
            link: The link.
            error: The error of its last use, or the reason.
        """
        refusal = explanation(link.reader.rest)
        if refusal is not None:
            self.refuse(link, refusal)
            return
        self.remove(link)
        if link.peer_id is not None:
            self._presence.cut_off(link.peer_id, _reason(error))

    def refuse(self, link: Link, error: AuthenticationError) -> None:
        """Drop a link whose other side refuses this process, or fails authentication."""
        self.remove(link)
        self._owner.refused(link.peer_id or "", error)

    def close(self) -> None:
        """Close all links without a message to peers."""
        for link in self.links.values():
            link.close()
        for known in (self.links, self.outgoing, self.entering):
            known.clear()

    # Out

    def send(self, link: Link, frame: bytes) -> None:
        """Send a short frame at once."""
        link.put(frame)
        self.flush(link)

    def say(self, link: Link, frame: bytes) -> None:
        """Send a short frame, together with others if more follow at once."""
        link.put(frame)
        if not self.gathers:
            self.flush(link)

    def flush(self, link: Link) -> None:
        """Write queued frames; the poller reports when there is room for the rest."""
        if link in self.entering:
            self.entering[link](link)
            return
        wanted = link.wants_write
        try:
            link.flush()
        except OSError as error:
            if is_shortage(error):  # nothing was written
                self.note_shortage(shortage(error, "send"))
                link.wants_write = True
            else:
                link.give_up_writing()
        except BaseException:  # a signal handler that raises: unrecorded bytes may have been sent
            link.give_up_writing()
            raise
        if link.tx is not None:
            if link.tx.other_sleeps:
                link.wake_peer()
        elif link.wants_write != wanted and link.fileno() in self.links:
            events = select.EPOLLIN | (select.EPOLLOUT if link.wants_write else 0)
            self._epoll.modify(link.fileno(), events)

    def note_shortage(self, error: ResourceError) -> None:
        """Note that a connection waits because this process lacks a resource; log each resource once."""
        self._shortage, self._short_at_ns = error, monotonic_ns()
        if error.errno not in self._logged_shortages:
            self._logged_shortages.add(error.errno)
            log.warning("a connection waits, and is tried again: %s", error)

    def shortage(self) -> ResourceError | None:
        """Return the last shortage of this process, if connections have met it lately."""
        return self._shortage if monotonic_ns() - self._short_at_ns < _LATELY_NS else None

    def flush_all(self) -> None:
        """Write the queued frames of all links, as far as there is room."""
        for link in list(self.links.values()):
            if not (link.is_idle() or (link.wants_write and link.tx is not None)):  # see `move_rings`
                self.flush(link)

    def go_on_in_ring(self, link: Link, writer: RingWriter) -> None:
        """Send queued frames over the socket, and all later ones through a ring."""
        self.flush(link)
        if link.is_idle():  # a fresh socket takes a frame or two
            self.rings.write(link, writer)

    # In

    def read(self, link: Link, of_ring: bool = False) -> bool:
        """Read a link, or its ring; drop it at its end. Return whether something came through a socket."""
        try:
            if of_ring:
                link.read_ring()
            elif link.read():
                self.recent = link
                return True
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and is_shortage(error):  # it is read again
                self.note_shortage(shortage(error, "recv"))
            else:
                self.hang_up(link, error)
        except AuthenticationError as error:  # a TLS listener says only now that it does not let us in
            self.refuse(link, error)
        except WireError as error:
            log.warning("closed the connection to %s: %s", link.peer_id, error)
            self.hang_up(link, error)
        except BaseException as error:  # a signal handler that raises: a frame may be half read
            self.hang_up(link, error)
            raise
        return False

    def read_recent(self) -> bool:
        """Read the link that something came through last; return whether something came again.

        That is seldom in vain while messages go to and fro, and costs less than a poll of all descriptors.
        """
        if self.recent is None:
            return False
        self.gathers = True
        try:
            came = self.read(self.recent)
        finally:
            self.gathers = False
        self.flush_all()
        return came

    def is_amid_frame(self) -> bool:
        """Whether some frame is read or written in part: its rest will move soon."""
        for link in self.links.values():  # noqa: SIM110 - no other thread runs during a loop in C
            if not link.reader.between_frames() or link.wants_write:
                return True
        return False

    def serve(self, link: Link, event: int) -> None:
        """Handle the events of a poll."""
        if link in self.entering:
            self.entering[link](link)
            return
        if event & ~select.EPOLLOUT:
            self.read(link)
        if event & select.EPOLLOUT and link.fileno() in self.links:
            self.flush(link)

    def move_rings(self) -> bool:
        """Read rings, and write to those that have room again; return whether there was work."""
        moved = False
        for link in list(self.rings.links):
            if link.rx is not None and link.rx.has_bytes:
                moved = self.gathers = True
                try:
                    self.read(link, True)
                finally:
                    self.gathers = False
            if link.wants_write and link.tx is not None and link.tx.has_room and link in self.rings.links:
                moved = True
                self.flush(link)
        if moved:
            self.flush_all()
        return moved

    # Now and then

    def drop_silent(self) -> None:
        """Drop links to hosts that vanished with data in flight.

        Without data in flight, keepalive detects it. The other kernel answers both, so a process that is busy
        or stopped is not lost.
        """
        for link in list(self.links.values()):
            sock = socket_below(link.sock)
            silent = isinstance(sock, socket.socket) and is_silent(sock, self._heartbeat_s)
            link.silent = link.silent + 1 if silent else 0
            if link.silent >= SILENT_LOOKS:
                self.hang_up(link, f"its host did not answer for {self._heartbeat_s:g} s")

    def settle(self) -> None:
        """See to the congestion control of links, by how far the other host turns out to be."""
        for link in self.links.values():
            if link.settling and isinstance(sock := socket_below(link.sock), socket.socket):
                link.settling = settle(sock, link.settling)


def _reason(error: BaseException | str) -> str:
    """Return why a link has ended, in words."""
    if isinstance(error, EOFError):
        return "closed by the other side"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return (error if isinstance(error, str) else f"{type(error).__name__}: {error}") or "frames were lost"
