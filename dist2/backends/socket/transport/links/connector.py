"""`Connector`: how the links of one process are made and accepted.

One listening socket, at most a fixed few links to each other process, all groups share them.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress

import structlog

from dist2.backends.socket.transport.links.acceptor import Guest, prepare
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.connecting import ATTEMPTS, Connecting
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.ring import RingWriter
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.errors import AuthenticationError, PeerLostError, WireError
from dist2.heartbeat import keep_alive
from dist2.security.entrance import Credentials, hang_up
from dist2.security.handshake import MESSAGE_BYTES, explanation, identity
from dist2.security.refusals import refusals
from dist2.wire import PROTOCOL_VERSION, Header, Hello, Kind

CONNECT_S = 2.0
"""To a process of this host; to another, connecting blocks nobody."""
_SYN_RETRIES = 2  # after 1 + 2 + 4 seconds a host that does not answer is given up

log = structlog.get_logger("dist2.fabric")

_in_process: weakref.WeakValueDictionary[str, Connector] = weakref.WeakValueDictionary()
"""Fabrics of this process, which ``inproc`` groups reach without a network."""


class Connector(Linkage):
    """Makes and accepts the links of one process; see `Linkage`."""

    def __init__(self, host: str, credentials: Credentials, heartbeat_s: float = 10.0) -> None:
        super().__init__(host, credentials, heartbeat_s)
        _in_process[self.card.fabric_id] = self

    def reach(self, mailbox: Mailbox, peer: int) -> Link:
        """Return the link to a member, connecting if there is none.

        Raises:
            PeerLostError: Nobody answers there any more.
        """
        fabric_id = mailbox.fabric_ids[peer]
        link = self._outgoing.get(fabric_id)
        if link is not None:
            return link
        if fabric_id in self._dead:
            raise PeerLostError(f"rank {peer} died", ranks=[peer])
        card = mailbox.cards[peer]
        beside = self.rings is not None and peer in mailbox.beside
        if self._credentials.required and not mailbox.inside:
            return self._call(card, beside)
        sock = self._connect_inside(card) if mailbox.inside else self._connect(card, beside)
        link = self._add_link(sock, card.fabric_id)
        self._outgoing[card.fabric_id] = link
        hello, ring = self._hello(card, beside)
        link.put(hello)
        if ring is not None:
            self._go_on_in_ring(link, ring)
        self._absent_groups.tell(link)
        self.flush(link)  # the other side does not wait for strangers for ever
        return link

    def _hello(self, card: Card, beside: bool) -> tuple[bytes, RingWriter | None]:
        """Return what a link begins with, and the ring that it offers."""
        offered = self.rings.offer() if self.rings is not None and beside else None
        writer, text = offered if offered is not None else (None, "")
        job_id = self._credentials.job_id
        return Hello(job_id, self.card.fabric_id, card.fabric_id, text).encode(), writer

    # Calls that both sides have to prove something for

    def _call(self, card: Card, beside: bool) -> Link:
        """Begin to connect; frames queue until both sides have proved who they are."""
        calling = Connecting(
            self._credentials, self.card.fabric_id, card, beside, lambda: self._hello(card, beside)
        )
        calling.take(self._connect(card, beside))
        link = self._add_link(calling, card.fabric_id)
        self._entering.add(link)
        self._outgoing[card.fabric_id] = link
        self._absent_groups.tell(link)
        self._advance(link)
        return link

    def _advance(self, link: Link) -> None:
        """Go on with a call."""
        calling = link.sock
        assert isinstance(calling, Connecting)  # it is entering
        try:
            opened = calling.entrance.advance()
        except AuthenticationError as error:
            self._not_let_in(link, error)
        except (EOFError, OSError):
            if calling.entrance.connected:
                self._call_again(link, calling)
            else:
                self._hang_up(link)
        else:
            if opened:
                self._open(link, calling)
            else:
                self._epoll.modify(link.fileno(), calling.events)

    def _open(self, link: Link, calling: Connecting) -> None:
        """Let frames through."""
        self._entering.discard(link)
        link.sock = calling.entrance.stream
        self._epoll.modify(link.fileno(), select.EPOLLIN)
        if calling.ring is not None:
            link.tx = calling.ring
            self._ringed.add(link)
        self.flush(link)
        if link.fileno() in self._links:
            self._read(link)  # what TLS has decrypted, no poll tells of

    def _call_again(self, link: Link, calling: Connecting) -> None:
        """Connect once more: a crowded listener may have ended the call, or one that waited for long.

        If the other side is gone, that fails at once.
        """
        if calling.attempts >= ATTEMPTS:
            why = "it does not authenticate itself: has it no DIST2_SECRET or DIST2_TLS_CERT?"
            self._not_let_in(link, AuthenticationError(why, reason="cut_off"))
            return
        try:
            sock = self._connect(calling.card, calling.beside)
        except PeerLostError:
            self._hang_up(link)
            return
        self._epoll.unregister(link.fileno())
        del self._links[link.fileno()]
        calling.take(sock)
        self._links[link.fileno()] = link
        self._epoll.register(link.fileno(), calling.events)
        self._advance(link)

    def _not_let_in(self, link: Link, error: AuthenticationError) -> None:
        """Fail the groups with a member that refuses this process, or is not what it claims to be."""
        self._remove(link)
        for mailbox in list(self._mailboxes.values()):
            rank = mailbox.rank_of(link.peer_id or "")
            if rank is not None and rank not in mailbox.left:
                card = mailbox.cards[rank]
                where = f"{card.host}:{card.port}"
                refusals.note("data", error.reason, where, str(error), rank=rank)
                why = AuthenticationError(
                    f"no connection to rank {rank} at {where}: {error}", reason=error.reason
                )
                self.fail(mailbox, why)

    def hear_why(self, link: Link) -> None:
        """Learn why a connection that takes nothing any more was refused, if it was; no frame is read."""
        if not isinstance(link.sock, socket.socket) or link.rx is not None:
            return  # whoever wrote to it had proved who it is
        with suppress(OSError):
            why = explanation(link.reader.rest + link.sock.recv(MESSAGE_BYTES, socket.MSG_PEEK))
            if why is not None:
                self._not_let_in(link, why)

    def _drop_calls_for_nothing(self) -> None:
        """Before the end, give up calls that nothing waits for: nobody may be there to answer them."""
        for link in [link for link in self._entering if link.idle]:
            self._remove(link)

    def _go_on_in_ring(self, link: Link, writer: RingWriter) -> None:
        """Send what is queued over the socket, everything later through a ring."""
        self.flush(link)
        if link.idle:  # a fresh socket takes a frame or two
            link.tx = writer
            self._ringed.add(link)

    def _connect(self, card: Card, beside: bool) -> socket.socket:
        """Return a connection, which to another host may still be coming about: frames wait for it.

        Args:
            card: Whom to reach.
            beside: On this host, where it takes no time, and what follows counts on its being complete.
        """
        try:
            family, kind, _, _, address = socket.getaddrinfo(card.host, card.port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
            try:
                sock.settimeout(CONNECT_S if beside else 0)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _SYN_RETRIES)
                code = sock.connect_ex(address)
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
                prepare(sock)
                keep_alive(sock, self._heartbeat_s)
            except OSError:
                sock.close()
                raise
        except OSError as error:
            raise PeerLostError(
                f"the process at {card.host}:{card.port} cannot be reached: {error.strerror or error}"
            ) from error
        return sock

    @staticmethod
    def _connect_inside(card: Card) -> socket.socket:
        other = _in_process.get(card.fabric_id)
        if other is None or other._closed:
            raise PeerLostError("the rank's fabric in this process is closed")
        mine, theirs = socket.socketpair()
        for end in (mine, theirs):
            end.setblocking(False)
        # Not taken in here: that needs the other's lock, and two that connect at once would wait for
        # each other.
        other._adopted.append(theirs)
        if other._deaf:  # it closed meanwhile, and may not have seen this one
            theirs.close()
        other.wake()
        return mine

    # Guests

    def _take_in_adopted(self) -> None:
        while self._adopted:
            self._let_in(self._acceptor.adopt(self._adopted.popleft()))

    def _let_in(self, guests: Iterable[Guest]) -> None:
        """Make links of connections whose other side has said who it is."""
        for guest in guests:
            try:
                self._check(guest)
            except WireError as error:
                refusals.note("data", "wrong_hello", guest.address, str(error))
                hang_up(guest.stream)
                continue
            link = self._add_link(guest.stream, guest.hello.fabric_id)
            try:
                self._welcome(link, guest.hello)
            except WireError as error:
                log.warning("connection_closed", reason=str(error), peer=link.peer_id)
                self._hang_up(link)
            else:
                self._read(link)  # what TLS has decrypted, no poll tells of

    def _check(self, guest: Guest) -> None:
        """See that a connection is meant for this process.

        Raises:
            WireError: It is of another protocol, job or meant for somebody else.
        """
        hello = guest.hello
        if hello.version != PROTOCOL_VERSION:
            raise WireError(f"protocol version {hello.version}, here it is {PROTOCOL_VERSION}")
        if hello.job_id != self._credentials.job_id:
            raise WireError(f"job id {hello.job_id!r}, here it is {self._credentials.job_id!r}")
        if hello.target != self.card.fabric_id:
            raise WireError("it means to reach another process")
        if hello.fabric_id == self.card.fabric_id or hello.fabric_id in self._dead:
            raise WireError("it calls itself by the name of this process, or of one that died")
        if guest.proven is not None and guest.proven != identity(hello.fabric_id):
            raise WireError("it calls itself by another name than the one that it proved")

    def _welcome(self, link: Link, hello: Hello) -> None:
        """Take a link into use.

        Raises:
            WireError: Its ring cannot be found.
        """
        if hello.ring and self.rings is not None:
            self.take_ring(link, hello.ring)
        if self._outgoing.setdefault(hello.fabric_id, link) is link and link.rx is not None:
            assert self.rings is not None  # the one that it was taken from
            offered = self.rings.offer()
            if offered is not None:
                text = offered[1].encode()
                link.put(Header(Kind.RING, nbytes=len(text)).encode() + text)
                self._go_on_in_ring(link, offered[0])
        self._absent_groups.tell(self._outgoing[hello.fabric_id])

    def take_ring(self, link: Link, text: str) -> None:
        """Read what a peer sends from its ring from now on.

        Raises:
            WireError: It cannot be found.
        """
        if self.rings is None:
            raise WireError("a ring where no memory is shared")
        try:
            link.rx = self.rings.take(link.peer_id or "", text)
        except (PeerLostError, ValueError, KeyError, TypeError) as error:
            raise WireError(f"a ring that cannot be opened: {error}") from error
        self._readers = (*self._readers, link.rx)
        self._ringed.add(link)
        self._ringed_from[link.peer_id or ""] = link
