"""`Linkage`: the links of one process, written to, watched and dropped."""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import structlog

from dist2.backends.socket.transport.links.acceptor import Acceptor
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.connecting import Connecting
from dist2.backends.socket.transport.links.link import Link, LinkStream, TlsLink
from dist2.backends.socket.transport.links.pacing import settle
from dist2.backends.socket.transport.links.ring import RingReader, RingWriter
from dist2.backends.socket.transport.messages.inbound import Inbound
from dist2.errors import AuthenticationError
from dist2.heartbeat import SILENT_LOOKS, is_silent
from dist2.security.entrance import Credentials
from dist2.security.handshake import explanation
from dist2.security.tls import TlsStream, socket_below

GRACE_S = 0.05
"""How long after a link's end what came over another is still taken in."""

log = structlog.get_logger("dist2.fabric")


class RingMaker(Protocol):
    """Makes the rings of links inside a host."""

    def offer(self) -> tuple[RingWriter, str] | None:
        """Return the writing end of a new ring and what the reader needs to find it."""

    def take(self, fabric_id: str, text: str) -> RingReader:
        """Return the reading end of a ring that a peer has offered."""


class Linkage(Inbound):
    """Links of one process.

    Args:
        host: Address to bind and to be reached at.
        credentials: What both sides of a connection have to prove.

    Attributes:
        card: How others reach it.
        rings: Makes rings for links inside the host, where memory is shared.
        congestion: Congestion control of links to near hosts, where the system's is BBR: see `pacing`.
    """

    def __init__(self, host: str, credentials: Credentials, heartbeat_s: float = 10.0) -> None:
        super().__init__()
        self._heartbeat_s = heartbeat_s
        self._credentials = credentials
        fabric_id = secrets.token_hex(16)
        self._epoll = select.epoll()
        try:
            self._acceptor = Acceptor(host, credentials, fabric_id, self._epoll, heartbeat_s)
        except BaseException:
            self._epoll.close()
            raise
        self.card = Card(fabric_id, host, self._acceptor.port)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._links: dict[int, Link] = {}
        self._entering: set[Link] = set()
        self._full: set[Link] = set()
        self._adopted: deque[socket.socket] = deque()
        self._watched: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._exited: set[str] = set()
        self._suspects: dict[str, float] = {}
        self._ringed: set[Link] = set()
        self._ringed_from: dict[str, Link] = {}
        self._readers: tuple[RingReader, ...] = ()
        self.rings: RingMaker | None = None
        self.congestion = "reno"
        self._closed = False
        self._deaf = False
        self._cut: set[str] = set()

    @abstractmethod
    def _linked(self) -> None:
        """There is a link."""

    @abstractmethod
    def wake(self) -> None:
        """Make whoever polls look up."""

    @abstractmethod
    def tell_finished(self) -> None:
        """Wake and call back whoever waits for what has been finished."""

    @abstractmethod
    def _flush_all(self) -> None:
        """Write what is queued on all links."""

    @abstractmethod
    def _read(self, link: Link, read: Callable[[], None] | None = None) -> None:
        """Read what is there, or by other means."""

    @abstractmethod
    def _advance(self, link: Link) -> None:
        """Go on with a call."""

    @abstractmethod
    def _not_let_in(self, link: Link, error: AuthenticationError) -> None:
        """Fail the groups with a member that refuses this process, or is not what it claims to be."""

    def outgoing(self, fabric_id: str) -> Link | None:
        """Return the link that messages to a process go over; None if there is none yet."""
        return self._outgoing.get(fabric_id)

    def heard_from(self, fabric_id: str) -> Link | None:
        """Return the link that short messages of a process come over; None before the first has come."""
        return self._heard.get(fabric_id)

    def ringed_from(self, fabric_id: str) -> Link | None:
        """Return the link whose ring the messages of a process come through, if they come through one."""
        return self._ringed_from.get(fabric_id)

    def _add_link(self, sock: LinkStream, peer_id: str) -> Link:
        calls = isinstance(sock, Connecting)
        encrypted = isinstance(sock, TlsStream) or (calls and self._credentials.tls is not None)
        link = (TlsLink if encrypted else Link)(self, sock, peer_id)
        self._links[link.fileno()] = link
        self._epoll.register(link.fileno(), select.EPOLLIN)
        self._linked()
        return link

    def _drop_silent(self) -> None:
        """Drop the links whose other host has vanished with data under way.

        Where none is, keepalive finds out. Both are answered by the other kernel: whatever its process
        does, be it stopped, it is there.
        """
        with self.lock:
            for link in list(self._links.values()):
                sock = socket_below(link.sock)
                silent = isinstance(sock, socket.socket) and is_silent(sock, self._heartbeat_s)
                link.silent = link.silent + 1 if silent else 0
                if link.silent >= SILENT_LOOKS:
                    self._hang_up(link)

    def _settle(self) -> None:
        """See to the congestion control of links whose other host turns out to be near."""
        with self.lock:
            for link in self._links.values():
                if link.settling and isinstance(sock := socket_below(link.sock), socket.socket):
                    link.settling = 0 if settle(sock, self.congestion) else link.settling - 1

    def _outgoing_and_incoming(self) -> list[Link]:
        return list(self._links.values())

    def flush(self, link: Link) -> None:
        """Write what is queued; have the poller tell when there is room for the rest."""
        if link in self._entering:
            self._advance(link)
            return
        wanted = link.wants_write
        try:
            link.flush()
        except OSError:
            link.give_up_writing()
        except BaseException:  # a signal handler that raises: bytes may have gone that nobody noted
            link.give_up_writing()
            raise
        if link.tx is not None:
            if link.tx.reader_sleeps:
                link.wake_peer()
        elif link.wants_write != wanted and link.fileno() in self._links:
            (self._full.add if link.wants_write else self._full.discard)(link)
            events = select.EPOLLIN | (select.EPOLLOUT if link.wants_write else 0)
            self._epoll.modify(link.fileno(), events)

    def _hang_up(self, link: Link) -> None:
        """Drop a link whose other side is gone, and tell the groups."""
        refused = explanation(link.reader.rest)
        if refused is not None:
            self._not_let_in(link, refused)
            return
        self._remove(link)
        if link.peer_id is not None:
            self._cut.add(link.peer_id)
            self.suspect(link.peer_id)

    def suspect(self, fabric_id: str) -> None:
        """Hold a process for gone in a moment: what it sent before may still come over another link."""
        self._suspects.setdefault(fabric_id, time.monotonic() + GRACE_S)

    def _resolve_suspects(self) -> None:
        now = time.monotonic()
        for fabric_id in [each for each, since in self._suspects.items() if since <= now]:
            del self._suspects[fabric_id]
            links = [link for link in self._links.values() if link.peer_id == fabric_id]
            if fabric_id in self._parted:
                self._has_left(fabric_id)
            elif not links or fabric_id in self._exited or fabric_id in self._cut:
                # Held open by what the process had forked; or one of two is cut, and frames went with it.
                for link in links:
                    self._remove(link)
                self._lost(fabric_id)

    def _remove(self, link: Link) -> None:
        fd = link.fileno()
        if self._links.pop(fd, None) is None:
            return
        self._entering.discard(link)
        self._full.discard(link)
        self._ringed.discard(link)
        self._readers = tuple(reader for reader in self._readers if reader is not link.rx)
        self._epoll.unregister(fd)
        if self._ringed_from.get(link.peer_id or "") is link:
            del self._ringed_from[link.peer_id or ""]
        if self._heard.get(link.peer_id or "") is link:
            del self._heard[link.peer_id or ""]
        if link.peer_id is not None and self._outgoing.get(link.peer_id) is link:
            del self._outgoing[link.peer_id]
        self._link_is_gone(link)
        link.close()

    def watch(self, fd: int, fabric_id: str, departed: Callable[[], bool]) -> None:
        """Hold a process for dead once ``fd`` (a pidfd) is readable, unless it ``departed()`` before."""
        known = self._watched.get(fd)  # without the lock: all but the first groups with it find it
        if known is not None and known[0] == fabric_id:
            return
        with self.lock:
            # A number may come again: closing forgets the one before.
            self._watched[fd] = (fabric_id, departed)
            with suppress(FileExistsError):
                self._epoll.register(fd, select.EPOLLIN)

    def is_watched(self, fabric_id: str) -> bool:
        """Whether the end of a process is seen without any link to it."""
        return fabric_id in self._exited or any(watched == fabric_id for watched, _ in self._watched.values())

    def has_died(self, fabric_id: str) -> bool:
        """Whether a process is known to have ended, and not in good order."""
        return fabric_id in self._dead or (fabric_id in self._exited and fabric_id not in self._parted)

    def mark_lost(self, fabric_id: str) -> None:
        """Hold a process for dead: its groups' pending and later messages fail."""
        with self.lock:
            self._lost(fabric_id)
            self._flush_all()
        self.tell_finished()
        self.wake()
