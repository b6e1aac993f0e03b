"""`Fabric`: the links of one process, and the progress of everything that goes over them.

One listening socket, at most a fixed few links to each other process, all groups share them. Whoever
waits makes progress for all groups: one thread at a time polls, the others sleep until something of
theirs is done or the role is free. A background thread plays that role while asynchronous messages are
pending and nobody waits.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns
from typing import Protocol

import structlog

from dist2.backends.socket.transport.card import Card
from dist2.backends.socket.transport.link import Link
from dist2.backends.socket.transport.mailbox import Mailbox
from dist2.backends.socket.transport.postal import Postal
from dist2.backends.socket.transport.ring import RingReader, RingWriter
from dist2.errors import GroupAbortedError, OperationTimeoutError, PeerLostError, RendezvousError, WireError
from dist2.wire import PROTOCOL_VERSION, Header, Hello, Kind

CONNECT_S = 2.0
"""To a process of this host; to another, connecting blocks nobody."""
HANDSHAKE_S = 10.0
MAX_STRANGERS = 256
"""Connections that have not said hello; more are refused."""
_FLUSH_S = 2.0
_IDLE_S = 2.0
_POLL_S = 0.05
_GRACE_S = 0.05
_SYN_RETRIES = 2  # after 1 + 2 + 4 seconds a host that does not answer is given up
_RING_TURNS = 16
_LOOKS = 20
_SOCKET_BYTES = 1 << 20

log = structlog.get_logger("dist2.fabric")


_in_process: weakref.WeakValueDictionary[str, Fabric] = weakref.WeakValueDictionary()
"""Fabrics of this process, which ``inproc`` groups reach without a network."""


class RingMaker(Protocol):
    """Makes the rings of links inside a host."""

    def offer(self) -> tuple[RingWriter, str] | None:
        """Return the writing end of a new ring and what the reader needs to find it."""

    def take(self, fabric_id: str, text: str) -> RingReader:
        """Return the reading end of a ring that a peer has offered."""


class Fabric(Postal):
    """Links and progress of one process.

    Args:
        host: Address to bind and to be reached at.
        job_id: Connections of other jobs are refused.
        spins: How often a waiter polls before it blocks.

    Attributes:
        card: How others reach it.
        rings: Makes rings for links inside the host, where memory is shared.
    """

    def __init__(self, host: str = "127.0.0.1", job_id: str = "", spins: int = 0) -> None:
        super().__init__()
        self._job_id = job_id
        self._spins = spins
        self._listener = _listen(host)
        port = self._listener.getsockname()[1]
        self.card = Card(secrets.token_hex(16), host, port)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._links: dict[int, Link] = {}
        self._strangers: dict[int, float] = {}
        self._adopted: deque[socket.socket] = deque()
        self._watched: dict[int, str] = {}
        self._exited: set[str] = set()
        self._suspects: dict[str, float] = {}
        self._role = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waiters = 0
        self._background: threading.Thread | None = None
        self._ringed: set[Link] = set()
        self._ring_turns = 0
        self._readers: tuple[RingReader, ...] = ()
        self.rings: RingMaker | None = None
        self._closed = False
        self._deaf = False
        self._cut: set[str] = set()
        self._last_refusal = 0.0
        _in_process[self.card.fabric_id] = self

    # Links

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
        sock = self._connect_inside(card) if mailbox.inside else self._connect(card, beside)
        link = self._add_link(sock, card.fabric_id)
        self._outgoing[card.fabric_id] = link
        offered = self.rings.offer() if self.rings is not None and beside else None
        ring = offered[1] if offered is not None else ""
        link.put(Hello(self._job_id, self.card.fabric_id, card.fabric_id, ring).encode())
        if offered is not None:
            self._go_on_in_ring(link, offered[0])
        self._lobby.tell(link)
        self._flush(link)  # the other side does not wait for strangers for ever
        return link

    def _go_on_in_ring(self, link: Link, writer: RingWriter) -> None:
        """Send what is queued over the socket, everything later through a ring."""
        self._flush(link)
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
                _prepare(sock)
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

    def _add_link(self, sock: socket.socket, peer_id: str | None) -> Link:
        link = Link(self, sock, peer_id)
        self._links[link.fileno()] = link
        self._epoll.register(link.fileno(), select.EPOLLIN)
        return link

    def _take_in_adopted(self) -> None:
        while self._adopted:
            link = self._add_link(self._adopted.popleft(), None)
            self._strangers[link.fileno()] = time.monotonic()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors: the caller waits, others are not to suffer for it
            if time.monotonic() - self._last_refusal > 1:
                self._last_refusal = time.monotonic()
                log.warning("connection_refused", reason=str(error), peer="a stranger")
            return
        self._drop_silent_strangers()
        if len(self._strangers) >= MAX_STRANGERS:
            log.warning("connection_refused", reason="too many without a hello", peer=address)
            sock.close()
            return
        _prepare(sock)
        link = self._add_link(sock, None)
        self._strangers[link.fileno()] = time.monotonic()

    def _drop_silent_strangers(self) -> None:
        limit = time.monotonic() - HANDSHAKE_S
        for fd in [fd for fd, since in self._strangers.items() if since < limit]:
            self._remove(self._links[fd])

    def welcome(self, link: Link, hello: Hello) -> None:
        """Take a hello: from now on the link is a peer's.

        Raises:
            WireError: It is of another protocol, job or meant for somebody else.
        """
        if hello.version != PROTOCOL_VERSION:
            raise WireError(f"protocol version {hello.version}, here it is {PROTOCOL_VERSION}")
        if hello.job_id != self._job_id:
            raise WireError(f"job id {hello.job_id!r}, here it is {self._job_id!r}")
        if hello.target != self.card.fabric_id:
            raise WireError("it means to reach another process")
        if hello.fabric_id == self.card.fabric_id or hello.fabric_id in self._dead:
            raise WireError("it calls itself by the name of this process, or of one that died")
        self._strangers.pop(link.fileno(), None)
        link.peer_id = hello.fabric_id
        if hello.ring and self.rings is not None:
            self.take_ring(link, hello.ring)
        if self._outgoing.setdefault(hello.fabric_id, link) is link and link.rx is not None:
            assert self.rings is not None  # the one that it was taken from
            offered = self.rings.offer()
            if offered is not None:
                text = offered[1].encode()
                link.put(Header(Kind.RING, nbytes=len(text)).encode() + text)
                self._go_on_in_ring(link, offered[0])
        self._lobby.tell(self._outgoing[hello.fabric_id])

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

    def _outgoing_and_incoming(self) -> list[Link]:
        return list(self._links.values())

    def _flush(self, link: Link) -> None:
        """Write what is queued; have the poller tell when there is room for the rest."""
        wanted = link.wants_write
        try:
            link.flush()
        except OSError:
            link.give_up_writing()
        if link.tx is not None:
            if link.tx.reader_sleeps:
                link.wake_peer()
        elif link.wants_write != wanted and link.fileno() in self._links:
            events = select.EPOLLIN | (select.EPOLLOUT if link.wants_write else 0)
            self._epoll.modify(link.fileno(), events)

    def _hang_up(self, link: Link) -> None:
        """Drop a link whose other side is gone, and tell the groups."""
        self._remove(link)
        if link.peer_id is not None:
            self._cut.add(link.peer_id)
            self.suspect(link.peer_id)

    def suspect(self, fabric_id: str) -> None:
        """Hold a process for gone in a moment: what it sent before may still come over another link."""
        self._suspects.setdefault(fabric_id, time.monotonic() + _GRACE_S)

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
        self._strangers.pop(fd, None)
        self._ringed.discard(link)
        self._readers = tuple(reader for reader in self._readers if reader is not link.rx)
        self._epoll.unregister(fd)
        if link.peer_id is not None and self._outgoing.get(link.peer_id) is link:
            del self._outgoing[link.peer_id]
        self._link_is_gone(link)
        link.close()

    # Progress

    def wake(self) -> None:
        """Make whoever polls look up. Safe in signal handlers."""
        if self._wake_fd >= 0:
            with suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)

    def watch(self, fd: int, fabric_id: str) -> None:
        """Hold a process for dead once ``fd`` (a pidfd) is readable."""
        with self.lock:
            if self._watched.get(fd) == fabric_id:
                return
            self._watched[fd] = fabric_id  # a number may come again: closing forgets the one before
            with suppress(FileExistsError):
                self._epoll.register(fd, select.EPOLLIN)

    def mark_lost(self, fabric_id: str) -> None:
        """Hold a process for dead: its groups' pending and later messages fail."""
        with self.lock:
            self._lost(fabric_id)
            self._flush_all()
        self.tell_finished()
        self.wake()

    def progress(self, timeout_s: float) -> None:
        """Poll once and do what can be done. Only with the role."""
        if self._ringed and self._serve_rings(timeout_s > 0):
            self.tell_finished()
            return
        events = self._epoll.poll(min(timeout_s, _GRACE_S) if self._suspects else timeout_s)
        with self.lock:
            if timeout_s > 0:
                self._doze(False)
            for fd, event in events:
                self._handle(fd, event)
            if self._suspects:
                self._resolve_suspects()
            self._flush_all()
        self.tell_finished()

    def _look_into_rings(self) -> None:
        """Poll memory for a few microseconds, which costs no system call."""
        for _ in range(_LOOKS):
            for reader in self._readers:
                if reader.has_bytes:
                    return

    def _serve_rings(self, sleepy: bool) -> bool:
        """Move what is in rings; where nothing is, and the caller means to sleep, ask to be woken."""
        with self.lock:
            moved = self._move_rings()
            if not moved and sleepy:
                self._doze(True)
                moved = self._move_rings()
                if moved:
                    self._doze(False)
        # Descriptors have their turn as well while rings are never empty.
        self._ring_turns = self._ring_turns + 1 if moved else 0
        return moved and self._ring_turns % _RING_TURNS != 0

    def _move_rings(self) -> bool:
        moved = False
        for link in list(self._ringed):
            if link.rx is not None and link.rx.has_bytes:
                moved = True
                try:
                    link.read_ring()
                except WireError as error:
                    log.warning("connection_closed", reason=str(error), peer=link.peer_id)
                    self._hang_up(link)
                    continue
            if link.wants_write and link.tx is not None and link.tx.has_room:
                moved = True
                self._flush(link)
        return moved

    def _doze(self, sleeping: bool) -> None:
        """Tell the other ends of rings whether to wake this process."""
        for link in self._ringed:
            if link.rx is not None:
                link.rx.doze(sleeping)
            if link.tx is not None and link.wants_write:
                link.tx.doze(sleeping)

    def tell_finished(self) -> None:
        """Wake and call back whoever waits for what has been finished. Without the lock."""
        if not self._finished:
            return
        with self.lock:
            finished, self._finished = self._finished, []
            if self._waiters:
                self._changed.notify_all()
        for message in finished:
            message.tell()

    def _handle(self, fd: int, event: int) -> None:
        link = self._links.get(fd)
        if link is not None:
            if event & ~select.EPOLLOUT:
                self._read(link)
            if event & select.EPOLLOUT and fd in self._links:
                self._flush(link)
        elif fd == self._listener.fileno():
            self._accept()
        elif fd == self._wake_fd:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
            self._take_in_adopted()
        elif fd in self._watched:
            self._epoll.unregister(fd)
            fabric_id = self._watched.pop(fd)
            self._exited.add(fabric_id)
            self.suspect(fabric_id)

    def _read(self, link: Link) -> None:
        try:
            link.read()
        except (EOFError, OSError):
            self._hang_up(link)
        except WireError as error:
            log.warning("connection_closed", reason=str(error), peer=link.peer_id or "a stranger")
            self._hang_up(link)

    def _flush_all(self) -> None:
        for link in list(self._links.values()):
            if not link.idle and not link.wants_write:
                self._flush(link)

    def run_until(self, done: Callable[[], bool], deadline_ns: int, interrupted: Callable[[], bool]) -> bool:
        """Make progress until ``done()``; False if the deadline passes or ``interrupted()`` first."""
        spins = self._spins
        while not done():
            if interrupted() or self._closed:
                return False
            left_s = (deadline_ns - monotonic_ns()) / 1e9
            if left_s <= 0:
                return False
            if self._role.acquire(blocking=False):
                try:
                    if self._closed:
                        return False
                    if spins > 0 and self._readers:
                        self._look_into_rings()
                    spins -= 1
                    self.progress(0 if spins >= 0 else min(left_s, _POLL_S))
                finally:
                    self._role.release()
                    if self._waiters:
                        with self.lock:
                            self._changed.notify_all()
            else:
                with self.lock:
                    self._waiters += 1
                    try:
                        # Whoever gives the role up looks at `_waiters` after; this looks the other way round.
                        if not done() and self._role.locked():
                            self._changed.wait(min(left_s, _POLL_S))
                    finally:
                        self._waiters -= 1
        return True

    def background(self) -> None:
        """See to it that messages make progress though nobody waits for them."""
        with self.lock:
            if self._background is None and not self._closed:
                self._background = threading.Thread(
                    target=self._run_background, name="dist2-progress", daemon=True
                )
                self._background.start()

    def _run_background(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self.lock:
                busy = any(mailbox.watched() for mailbox in self._mailboxes.values())
                if busy:
                    idle_since = time.monotonic()
                if self._closed or time.monotonic() - idle_since > _IDLE_S:
                    self._background = None
                    return
            self._fail_overdue()
            pause_ns = monotonic_ns() + int(_POLL_S * 1e9)
            self.run_until(lambda: False, pause_ns, lambda: self._closed)

    def _fail_overdue(self) -> None:
        """Fail the asynchronous messages whose deadline has passed, and those of aborted groups."""
        now = monotonic_ns()
        with self.lock:
            for mailbox in self._mailboxes.values():
                if mailbox.aborted is not None:
                    self.fail(mailbox, mailbox.aborted)
                for message in mailbox.pending():
                    if message.deadline_ns < now:
                        self.withdraw(mailbox, message)
                        missing = [message.source] if message.source >= 0 else []
                        names = ", ".join(map(str, missing)) or "any"
                        self.finish(
                            message,
                            OperationTimeoutError(f"rank(s) {names} did not arrive in time", missing=missing),
                        )
        self.tell_finished()

    # The end

    def close(self) -> None:
        """Send what is queued (for two seconds at most), then close everything. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._ended = GroupAbortedError("the links of this process were closed")
            for mailbox in self._mailboxes.values():
                self.fail(mailbox, self._ended)
        deadline = time.monotonic() + _FLUSH_S
        with self._role:
            with self.lock:
                self._take_in_adopted()
                self._accept()
                for link in self._links.values():
                    link.put(Header(Kind.BYE).encode())
            while time.monotonic() < deadline:
                with self.lock:
                    busy = [link for link in self._links.values() if not link.idle]
                    if not busy:
                        break
                    for link in busy:
                        link.discard_incoming()  # two that close at once must not wait for each other
                        self._flush(link)
                self._epoll.poll(0.01)
            with self.lock:
                for link in self._links.values():
                    link.discard_incoming()
                self._close_descriptors()
                background = self._background
        self.tell_finished()
        if background is not None and background is not threading.current_thread():
            background.join(_FLUSH_S)

    def _close_descriptors(self) -> None:
        self._deaf = True
        for link in self._links.values():
            link.close()
        while self._adopted:
            self._adopted.popleft().close()
        self._links.clear()
        self._outgoing.clear()
        self._listener.close()
        self._epoll.close()
        # Forgotten first: another thread must not write to what the number stands for next.
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    def forget_in_child(self) -> None:
        """After a fork: close the inherited descriptors, telling nobody."""
        if not self._closed:
            self._closed = True
            self._close_descriptors()


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(MAX_STRANGERS)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"host {host!r} cannot be listened on: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
