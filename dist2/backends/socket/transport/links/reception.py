"""`Reception`: accepts or refuses incoming connections. The fabric's lock guards it."""

from __future__ import annotations

import logging
import secrets
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from dist2.backends.socket.transport.links.acceptor import Acceptor, Guest
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.wire import PROTOCOL_VERSION, Header, Hello, Kind
from dist2.errors import PeerLostError, WireError
from dist2.runtime.resources import shortage
from dist2.security.authenticator import Credentials, hang_up
from dist2.security.handshake import identity
from dist2.security.refusals import refusals
from dist2.security.tls import TlsStream

log = logging.getLogger("dist2.fabric")

_in_process: weakref.WeakValueDictionary[str, Reception] = weakref.WeakValueDictionary()
"""Those of this process, which ``inproc`` groups reach without a network."""


class Reception:
    """Turns incoming connections into links.

    Args:
        host: Address to bind and to be reached at.
        credentials: The proof required of connections.
        linkage: Where the links go.
        presence: Knows which processes are dead.
        epoll: Polls the listening socket and the strangers.
        wake: Wakes the thread that polls.
        heartbeat_s: How long a host may be silent before its processes are held for dead, in seconds.

    Attributes:
        card: How others reach it.
        acceptor: The listening socket, and the strangers.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        linkage: Linkage,
        presence: Presence,
        epoll: select.epoll,
        wake: Callable[[], None],
        heartbeat_s: float,
    ) -> None:
        fabric_id = secrets.token_hex(16)
        self.acceptor = Acceptor(host, credentials, fabric_id, epoll, heartbeat_s, linkage.congestion)
        self.card = Card(fabric_id, host, self.acceptor.port)
        self._credentials = credentials
        self._linkage = linkage
        self._presence = presence
        self._wake = wake
        self._adopted: deque[socket.socket] = deque()
        self._expects = True
        self._closed = False
        _in_process[fabric_id] = self

    def __contains__(self, fd: int) -> bool:
        """Whether a descriptor is served here."""
        return fd in self.acceptor

    def serve(self, fd: int) -> None:
        """Handle the events of a poll."""
        self._let_in(self.acceptor.serve(fd))

    def sweep(self) -> None:
        """Close connections whose hello is overdue, and accept again after a pause."""
        if self.acceptor:
            self._let_in(self.acceptor.sweep())

    def adopt(self, sock: socket.socket) -> None:
        """Have another end of a connection inside of this process let in. It needs no lock."""
        self._adopted.append(sock)
        if self._closed:  # it closed meanwhile, and may not have seen this one
            sock.close()
        self._wake()

    def take_in_adopted(self) -> None:
        """Let in connections from inside of this process."""
        while self._adopted:
            self._let_in(self.acceptor.adopt(self._adopted.popleft()))

    def stop(self) -> None:
        """Stop expecting connections from inside this process."""
        self._expects = False

    def let_in_the_last(self) -> None:
        """Accept the connections that arrived before the end."""
        self.take_in_adopted()
        self._let_in(self.acceptor.accept())

    def close(self) -> None:
        """Close the listening socket, and connections that are no links yet."""
        self._closed = True
        while self._adopted:
            self._adopted.popleft().close()
        self.acceptor.close()

    @staticmethod
    def is_inside(fabric_id: str) -> bool:
        """Whether there is such a fabric in this process."""
        return fabric_id in _in_process

    @staticmethod
    def has_departed(fabric_id: str) -> bool:
        """Whether a fabric of this process takes no connections any more: no rank of it can die alone."""
        fabric = _in_process.get(fabric_id)
        return fabric is None or not fabric._expects

    @staticmethod
    def connect(fabric_id: str) -> socket.socket:
        """Return a connection to another fabric of this process.

        Raises:
            PeerLostError: It is closed.
            ResourceError: This process lacks descriptors.
        """
        other = _in_process.get(fabric_id)
        if other is None or Reception.has_departed(fabric_id):
            raise PeerLostError("the rank's fabric in this process is closed")
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            raise shortage(error, "socketpair") from error
        for end in (mine, theirs):
            end.setblocking(False)
        # Not taken in here: that needs the other's lock, and two that connect at once would wait for
        # each other.
        other.adopt(theirs)
        return mine

    def _let_in(self, guests: Iterable[Guest]) -> None:
        """Make links of connections whose hello has arrived."""
        linkage = self._linkage
        for guest in guests:
            try:
                self._check(guest)
            except WireError as error:
                refusals.note("data", "wrong_hello", guest.address, str(error))
                hang_up(guest.stream)
                continue
            encrypted = isinstance(guest.stream, TlsStream)
            link = linkage.add(guest.stream, guest.hello.fabric_id, encrypted)
            try:
                self._welcome(link, guest.hello)
            except WireError as error:
                log.warning("closed the connection to %s: %s", link.peer_id, error)
                linkage.hang_up(link, error)
            else:
                linkage.read(link)  # a poll does not report bytes that TLS has decrypted

    def _check(self, guest: Guest) -> None:
        """Check that a connection is meant for this process.

        Raises:
            WireError: It is of another protocol or job, or meant for another process.
        """
        hello, me = guest.hello, self.card.fabric_id
        if hello.version != PROTOCOL_VERSION:
            raise WireError(f"protocol version {hello.version}, here it is {PROTOCOL_VERSION}")
        if hello.job_id != self._credentials.job_id:
            raise WireError(f"job id {hello.job_id!r}, here it is {self._credentials.job_id!r}")
        if hello.target != me:
            raise WireError("it addresses another process")
        if hello.fabric_id == me or hello.fabric_id in self._presence.dead:
            raise WireError("it uses the name of this process, or of one that died")
        if guest.proven is not None and guest.proven != identity(hello.fabric_id):
            raise WireError("its name is not the one that it authenticated")

    def _welcome(self, link: Link, hello: Hello) -> None:
        """Take a link into use.

        Raises:
            WireError: Its ring cannot be found.
        """
        linkage, rings = self._linkage, self._linkage.rings
        if hello.ring and rings.maker is not None:
            rings.read(link, hello.ring)
        if linkage.outgoing.setdefault(hello.fabric_id, link) is link and link.rx is not None:
            offered = rings.offer()
            if offered is not None:
                text = offered[1].encode()
                link.put(Header(Kind.RING, nbytes=len(text)).encode() + text)
                linkage.go_on_in_ring(link, offered[0])
        linkage.greet(linkage.outgoing[hello.fabric_id])
