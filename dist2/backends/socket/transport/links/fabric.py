"""`Fabric`: the links of one process, and the progress of everything that goes over them.

One listening socket, at most a fixed few links to each other process, all groups share them. Whoever
waits makes progress for all groups: one thread at a time polls, the others sleep until something of
theirs is done or the role is free. A background thread plays that role while asynchronous messages are
pending and nobody waits.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns

import structlog

from dist2.backends.socket.transport.links.connector import Connector
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.link_watch import LinkWatch
from dist2.backends.socket.transport.links.linkage import GRACE_S
from dist2.backends.socket.transport.links.ring import RingReader
from dist2.backends.socket.transport.messages.explaining import overdue
from dist2.backends.socket.transport.spinning import Crowd, Spinning
from dist2.ctrl_c import ctrl_c
from dist2.errors import AuthenticationError, GroupAbortedError, WireError
from dist2.security.entrance import Credentials
from dist2.wire import Header, Kind

_FLUSH_S = 2.0
_IDLE_S = 2.0
_POLL_S = 0.05
_RING_TURNS = 16
_LOOKS = 20
_TICK_S = 0.001
_GLANCE_NS = 5_000_000
_BORROW_NS = 2_000_000
"""How long messages are read out of other processes' memory before their senders are told,"""
_BORROW_BRIEFLY_NS = 100_000
"""and where whoever polls may be about to do something else: a collective, say."""
_CALLED_NS = 2_000_000
"""After a call that posts or waits, it is taken that the next one comes soon, and polls by itself."""

log = structlog.get_logger("dist2.fabric")


class Fabric(Connector):
    """Links and progress of one process.

    Args:
        host: Address to bind and to be reached at.
        job_id: Connections of other jobs are refused.
        spins: How often a waiter polls before it blocks.
        attend_s: How often links are looked into while nobody waits, in seconds; 0 for never.
        heartbeat_s: How long a host may be silent before its processes are held for dead, in seconds.
        credentials: What connections have to prove; by default, to be of this job.

    Attributes:
        card: How others reach it.
        rings: Makes rings for links inside the host, where memory is shared.
        spins: How often a waiter polls before it blocks.
        crowd: Whether it had better block at once.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        job_id: str = "",
        spins: int = 0,
        attend_s: float = 0.0,
        heartbeat_s: float = 10.0,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(host, credentials or Credentials(job_id=job_id), heartbeat_s)
        self.spins = spins
        self.crowd = Crowd()
        self._role = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waiters = 0
        self._background: threading.Thread | None = None
        self._background_polls = False
        self._ending = threading.Event()
        self._ring_turns = 0
        self._looks = 0
        self._glanced_ns = 0
        self._called_ns = 0
        self._link_watch = LinkWatch(self._look_after_links, attend_s)

    def wake(self) -> None:
        """Make whoever polls look up. Safe in signal handlers."""
        if self._wake_fd >= 0:
            with suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)

    # The role of the one who polls

    def take_role(self) -> bool:
        """Become the one who polls; False if somebody is, or the fabric is closed."""
        if self._closed or not self._role.acquire(blocking=False):
            return False
        if self._closed:
            self._role.release()
            return False
        return True

    def give_role(self) -> None:
        """Let somebody else poll."""
        self._role.release()
        if self._waiters:
            with self.lock:
                self._changed.notify_all()

    def is_wanted(self, awaited: RingReader | None) -> bool:
        """Whether who looks into one ring, or one socket, holds up a waiter, or what came elsewhere."""
        if self._waiters:
            return True
        for reader in self._readers:  # noqa: SIM110 - `any` of a generator costs three times as much
            if reader is not awaited and reader.has_bytes:
                return True
        return False

    def progress(self, timeout_s: float, borrow_ns: int = _BORROW_BRIEFLY_NS) -> None:
        """Poll once and do what can be done, reading long messages for so long. Only with the role."""
        if self._borrowing:
            self.borrow_until(monotonic_ns() + borrow_ns)
            with self.lock:
                self._flush_all()
            timeout_s = 0
        if self._ringed and self._serve_rings(timeout_s > 0):
            self.tell_finished()
            return
        events = self._epoll.poll(min(timeout_s, GRACE_S) if self._suspects else timeout_s)
        with self.lock:
            if timeout_s > 0:
                self._doze(False)
            self._gathers = True
            try:
                for fd, event in events:
                    self._handle(fd, event)
            finally:
                self._gathers = False
            if self._suspects:
                self._resolve_suspects()
            if self._deserted:
                self._resolve_deserted()
            if self._acceptor:
                self._let_in(self._acceptor.sweep())
            self._flush_all()
        self.tell_finished()

    def glance(self) -> None:
        """Take in what has come, if nobody has done so for 5 ms: an operation that never waits
        is to hear of deaths and mismatches as well."""
        self._called_ns = now = monotonic_ns()
        if now - self._glanced_ns >= _GLANCE_NS:
            self._glanced_ns = now
            self.attend()

    @property
    def is_full(self) -> bool:
        """Whether a link has more to write than its socket took."""
        return bool(self._full)

    def press(self) -> None:
        """Write on where a link was full, if one was."""
        if self._full:
            with self.lock:
                for link in list(self._full):
                    self.flush(link)

    def _look_into_rings(self) -> bool:
        """Look for a few microseconds whether something has come, which costs no system call."""
        for _ in range(_LOOKS if self.spins else 1):
            for reader in self._readers:
                if reader.has_bytes:
                    return True
        return False

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
                self._gathers = True
                try:
                    link.read_ring()
                except WireError as error:
                    log.warning("connection_closed", reason=str(error), peer=link.peer_id)
                    self._hang_up(link)
                    continue
                except BaseException:  # as in `_read`
                    self._hang_up(link)
                    raise
                finally:
                    self._gathers = False
            if link.wants_write and link.tx is not None and link.tx.has_room:
                moved = True
                self.flush(link)
        if moved:
            self._flush_all()
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
            if link in self._entering:
                self._advance(link)
                return
            if event & ~select.EPOLLOUT:
                self._read(link)
            if event & select.EPOLLOUT and fd in self._links:
                self.flush(link)
        elif fd in self._acceptor:
            self._let_in(self._acceptor.serve(fd))
        elif fd == self._wake_fd:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
            self._take_in_adopted()
        elif fd in self._watched:
            self._epoll.unregister(fd)
            fabric_id, departed = self._watched.pop(fd)
            self._exited.add(fabric_id)
            if departed():
                self._parted.add(fabric_id)
            self.suspect(fabric_id)

    def take_in(self, link: Link, *parts: memoryview) -> None:
        """Take in what who has the role read from a link's socket."""

        def read() -> None:
            for part in parts:
                link.take_in(part)

        self._gathers = True
        try:
            self._read(link, read)
        finally:
            self._gathers = False
        self._flush_all()

    def read(self, link: Link) -> None:
        """Read what is there. Only with the role."""
        with self.lock:
            if link.fileno() in self._links:
                self._read(link)
                self._flush_all()

    def cut(self, link: Link) -> None:
        """Drop a link of which bytes were lost."""
        with self.lock:
            self._hang_up(link)

    def _read(self, link: Link, read: Callable[[], None] | None = None) -> None:
        try:
            (read or link.read)()
        except (EOFError, OSError):
            self._hang_up(link)
        except AuthenticationError as error:  # a TLS listener says only now that it does not let us in
            self._not_let_in(link, error)
        except WireError as error:
            log.warning("connection_closed", reason=str(error), peer=link.peer_id)
            self._hang_up(link)
        except BaseException:  # a signal handler that raises: a frame may be half read
            self._hang_up(link)
            raise

    def _flush_all(self) -> None:
        for link in list(self._links.values()):
            if not link.idle and not link.wants_write:
                self.flush(link)

    def run_until(self, done: Callable[[], bool], deadline_ns: int, interrupted: Callable[[], bool]) -> bool:
        """Make progress until ``done()``; False if the deadline passes or ``interrupted()`` first."""
        wakeful = Spinning(self.spins, self.crowd)
        while not done():
            if interrupted() or self._closed:
                return False
            if ctrl_c.pending:
                ctrl_c.look()
            self._called_ns = now = monotonic_ns()
            if now >= deadline_ns:
                return False
            left_s = (deadline_ns - now) / 1e9
            if self.take_role():
                try:
                    self._poll(left_s, wakeful.at(now))
                finally:
                    self.give_role()
            else:
                self._wait_for_role(done, left_s)
        return True

    def _poll(self, left_s: float, awake: bool) -> None:
        """Make progress once: by looking, or asleep until something comes."""
        if not awake:
            self.progress(min(left_s, _POLL_S), _BORROW_NS)
        elif self._look_into_rings():
            self.progress(0, _BORROW_NS)
        else:
            self._looks += 1
            if not self._borrowing:
                self.crowd.give_way()
                if self._looks % _RING_TURNS and self._readers:
                    return
            self.progress(0, _BORROW_NS)

    def _wait_for_role(self, done: Callable[[], bool], left_s: float) -> None:
        """Sleep until something was done or nobody polls."""
        with self.lock:
            self._waiters += 1
            try:
                if self._background_polls:
                    self.wake()  # it polls for those who do not wait
                # Whoever gives the role up looks at `_waiters` after; this looks the other way round.
                if not done() and self._role.locked():
                    self._changed.wait(min(left_s, _POLL_S))
            finally:
                self._waiters -= 1

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has something to do."""
        return self._epoll.fileno()

    def attend(self) -> None:
        """Make what progress there is to make without waiting, unless another thread does."""
        if not self.take_role():
            return
        try:
            self.progress(0)
        finally:
            self.give_role()

    def background(self) -> None:
        """See to it that messages make progress though nobody waits for them."""
        with self.lock:
            if self._background is None and not self._closed:
                self._background = threading.Thread(
                    target=self._run_background, name="dist2-progress", daemon=True
                )
                self._background.start()

    def _run_background(self) -> None:
        """Poll while messages are pending that nobody waits for: those who wait poll for themselves."""
        idle_since = time.monotonic()
        while True:
            with self.lock:
                busy = any(mailbox.watched() for mailbox in self._mailboxes.values())
                if busy:
                    idle_since = time.monotonic()
                if self._closed or time.monotonic() - idle_since > _IDLE_S:
                    self._background = None
                    return
            # A moment each time, for whoever is about to wait.
            self._ending.wait(_TICK_S)
            if busy:
                self.fail_overdue()
                if monotonic_ns() - self._called_ns > _CALLED_NS:
                    self._poll_in_background()

    def _poll_in_background(self) -> None:
        """Poll until something comes or somebody wants to wait."""
        if self._waiters or not self.take_role():
            return
        self._background_polls = True
        try:
            if not self._waiters:  # who comes later wakes this thread
                self.progress(_POLL_S)
        finally:
            self._background_polls = False
            self.give_role()

    def fail_overdue(self) -> None:
        """Fail the asynchronous messages whose deadline has passed, and those of aborted groups."""
        now = monotonic_ns()
        with self.lock:
            for mailbox in self._mailboxes.values():
                if mailbox.aborted is not None:
                    self.fail(mailbox, mailbox.aborted)
                for message in mailbox.pending():
                    if message.deadline_ns < now:
                        missing = [message.source] if message.source >= 0 else []
                        error = overdue(mailbox, missing, collective=False)
                        mailbox.note_reason(error)
                        self.withdraw(mailbox, message)
                        self.finish(message, error)
        self.tell_finished()

    def _look_after_links(self) -> None:
        self.attend()
        self._drop_silent()
        self._settle()

    def _linked(self) -> None:
        self._link_watch.start()

    # The end

    def close(self) -> None:
        """Send what is queued (for two seconds at most), then close everything. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._ending.set()
            self._ended = GroupAbortedError("the links of this process were closed")
            for mailbox in self._mailboxes.values():
                self.fail(mailbox, self._ended)
        self._link_watch.stop()
        deadline = time.monotonic() + _FLUSH_S
        with self._role:
            with self.lock:
                self._take_in_adopted()
                self._let_in(self._acceptor.accept())
                self._drop_calls_for_nothing()
                for link in self._links.values():
                    link.put(Header(Kind.BYE).encode())
            while time.monotonic() < deadline:
                with self.lock:
                    busy = [link for link in self._links.values() if not link.idle]
                    if not busy:
                        break
                    for link in busy:
                        link.discard_incoming()  # two that close at once must not wait for each other
                        self.flush(link)
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
        self._entering.clear()
        self._acceptor.close()
        self._epoll.close()
        # Forgotten first: another thread must not write to what the number stands for next.
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    def forget_in_child(self) -> None:
        """After a fork: close the inherited descriptors, telling nobody."""
        if not self._closed:
            self._closed = True
            self._close_descriptors()
