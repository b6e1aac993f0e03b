"""`Connector`: makes links to other processes. The fabric's lock guards it."""

from __future__ import annotations

import errno
import os
import select
import socket

from dist2.backends.socket.transport.links.acceptor import prepare
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.connecting import ATTEMPTS, Connecting
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.pacing import begin
from dist2.backends.socket.transport.links.reception import Reception
from dist2.backends.socket.transport.links.ring import RingWriter
from dist2.backends.socket.wire import Hello
from dist2.errors import AuthenticationError, PeerLostError, ResourceError
from dist2.runtime.resources import is_shortage, shortage
from dist2.runtime.tcp_keepalive import keep_alive
from dist2.security.authenticator import Credentials

CONNECT_S = 2.0
"""To a process of this host; connecting to another host does not block."""
_SYN_RETRIES = 2  # after 1 + 2 + 4 seconds a host that does not answer is given up


class Connector:
    """Connects to other processes.

    Args:
        me: Fabric id of this process.
        credentials: The proof required of both sides of a connection.
        linkage: Where the links go.
        epoll: Polls them.
        heartbeat_s: How long a host may be silent before its processes are held for dead, in seconds.
    """

    def __init__(
        self, me: str, credentials: Credentials, linkage: Linkage, epoll: select.epoll, heartbeat_s: float
    ) -> None:
        self._me = me
        self._credentials = credentials
        self._linkage = linkage
        self._epoll = epoll
        self._heartbeat_s = heartbeat_s

    def connect(self, card: Card, *, inside: bool, beside: bool) -> Link:
        """Make a link to a process.

        Args:
            card: How to reach it.
            inside: It is a fabric of this process.
            beside: It shares memory with this one.

        Raises:
            PeerLostError: No process answers there any more.
            ResourceError: This process lacks descriptors or memory.
        """
        linkage = self._linkage
        beside = beside and linkage.rings.maker is not None
        if self._credentials.required and not inside:
            return self._call(card, beside)
        sock = Reception.connect(card.fabric_id) if inside else self._connect(card, beside)
        link = linkage.outgoing[card.fabric_id] = linkage.add(sock, card.fabric_id)
        hello, ring = self._hello(card, beside)
        link.put(hello)
        if ring is not None:
            linkage.go_on_in_ring(link, ring)
        linkage.greet(link)
        linkage.flush(link)  # the other side does not wait for strangers for ever
        return link

    def _hello(self, card: Card, beside: bool) -> tuple[bytes, RingWriter | None]:
        """Return the first frame of a link, and the ring that it offers."""
        offered = self._linkage.rings.offer() if beside else None
        writer, text = offered if offered is not None else (None, "")
        return Hello(self._credentials.job_id, self._me, card.fabric_id, text).encode(), writer

    def _connect(self, card: Card, beside: bool) -> socket.socket:
        """Return a connection; to another host it may still be in progress: frames wait for it.

        Args:
            card: The peer.
            beside: Whether the peer is on this host. Then connecting takes no time, and the caller relies on
                a complete connection.
        """
        try:
            family, kind, _, _, address = socket.getaddrinfo(card.host, card.port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
            try:
                sock.settimeout(CONNECT_S if beside else 0)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _SYN_RETRIES)
                begin(sock, self._linkage.congestion)
                code = sock.connect_ex(address)
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
                prepare(sock)
                keep_alive(sock, self._heartbeat_s)
            except OSError:
                sock.close()
                raise
        except OSError as error:
            if is_shortage(error):
                raise shortage(error, "a connection") from error
            raise PeerLostError(
                f"the process at {card.host}:{card.port} cannot be reached: {error.strerror or error}"
            ) from error
        return sock

    # Calls that both sides have to prove something for

    def _call(self, card: Card, beside: bool) -> Link:
        """Begin to connect; frames are queued until both sides have authenticated."""
        calling = Connecting(self._credentials, self._me, card, beside, lambda: self._hello(card, beside))
        calling.take(self._connect(card, beside))
        linkage = self._linkage
        link = linkage.add(calling, card.fabric_id, encrypted=self._credentials.tls is not None)
        linkage.entering[link] = self._advance
        linkage.outgoing[card.fabric_id] = link
        linkage.greet(link)
        self._advance(link)
        return link

    def _advance(self, link: Link) -> None:
        """Go on with a call."""
        calling = link.sock
        assert isinstance(calling, Connecting)  # it is entering
        try:
            opened = calling.entrance.advance()
        except AuthenticationError as error:
            self._linkage.refuse(link, error)
        except (EOFError, OSError) as error:
            if calling.entrance.connected:
                self._call_again(link, calling)
            else:
                self._linkage.hang_up(link, error)
        else:
            if opened:
                self._open(link, calling)
            else:
                self._epoll.modify(link.fileno(), calling.events)

    def _open(self, link: Link, calling: Connecting) -> None:
        """Let frames through."""
        linkage = self._linkage
        del linkage.entering[link]
        link.sock = calling.entrance.stream
        self._epoll.modify(link.fileno(), select.EPOLLIN)
        if calling.ring is not None:
            linkage.rings.write(link, calling.ring)
        linkage.flush(link)
        if link.fileno() in linkage.links:
            linkage.read(link)  # a poll does not report bytes that TLS has decrypted

    def _call_again(self, link: Link, calling: Connecting) -> None:
        """Connect once more: a listener with too many connections may have closed this one, or one that
        waited for long.

        If the other side is gone, that fails at once.
        """
        linkage = self._linkage
        if calling.attempts >= ATTEMPTS:
            why = "it does not authenticate itself: set the same DIST2_SECRET or DIST2_TLS_CERT there"
            linkage.refuse(link, AuthenticationError(why, reason="cut_off"))
            return
        try:
            sock = self._connect(calling.card, calling.beside)
        except (PeerLostError, ResourceError) as error:
            linkage.hang_up(link, str(error))
            return
        self._epoll.unregister(link.fileno())
        del linkage.links[link.fileno()]
        calling.take(sock)
        linkage.links[link.fileno()] = link
        self._epoll.register(link.fileno(), calling.events)
        self._advance(link)

    def drop_calls_for_nothing(self) -> None:
        """Before the end, cancel outgoing connections that nothing waits for: the peer may be gone."""
        for link in [link for link in self._linkage.entering if link.is_idle()]:
            self._linkage.remove(link)
