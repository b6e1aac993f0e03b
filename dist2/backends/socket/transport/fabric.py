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

from dist2.backends.socket.transport.links.background import Background
from dist2.backends.socket.transport.links.connector import Connector
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.link_watch import LinkWatch
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import GRACE_S, Presence
from dist2.backends.socket.transport.links.reception import Reception
from dist2.backends.socket.transport.links.ring import RingReader
from dist2.backends.socket.transport.links.rings import RingMaker
from dist2.backends.socket.transport.messages.absent_groups import AbsentGroups
from dist2.backends.socket.transport.messages.assembly import Assembly
from dist2.backends.socket.transport.messages.borrower import Borrower
from dist2.backends.socket.transport.messages.comparison import Comparison
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.delivery import Delivery
from dist2.backends.socket.transport.messages.departures import Departures
from dist2.backends.socket.transport.messages.dispatch import Dispatch
from dist2.backends.socket.transport.messages.groups import Groups
from dist2.backends.socket.transport.messages.intake import Intake, handlers
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.probes import Probes
from dist2.backends.socket.transport.spinning import Crowd, Spinning
from dist2.ctrl_c import ctrl_c
from dist2.errors import GroupAbortedError
from dist2.security.entrance import Credentials
from dist2.wire import Header, Kind

_FLUSH_S = 2.0
_POLL_S = 0.05
_RING_TURNS = 16
_LOOKS = 20
_GLANCE_NS = 5_000_000
_BORROW_NS = 2_000_000
"""How long messages are read out of other processes' memory before their senders are told,"""
_BORROW_BRIEFLY_NS = 100_000
"""and where whoever polls may be about to do something else: a collective, say."""
_CALLED_NS = 2_000_000
"""After a call that posts or waits, it is taken that the next one comes soon, and polls by itself."""


class Fabric:
    """Links and progress of one process: it puts the parts together, owns their lock, and makes them go on.

    Args:
        host: Address to bind and to be reached at.
        job_id: Connections of other jobs are refused.
        spins: How often a waiter polls before it blocks.
        attend_s: How often links are looked into while nobody waits, in seconds; 0 for never.
        heartbeat_s: How long a host may be silent before its processes are held for dead, in seconds.
        credentials: What connections have to prove; by default, to be of this job.
        rings: Makes rings for links inside the host, where memory is shared.
        congestion: See `Linkage`.

    Attributes:
        lock: Guards everything about links and messages.
        card: How others reach it.
        spins: How often a waiter polls before it blocks.
        crowd: Whether it had better block at once.
        linkage: The links there are.
        groups: Opens and closes groups.
        courier: Finds the links to members.
        dispatch: Posts and sends messages.
        delivery: Gives messages to their receives.
        outcomes: Ends messages.
        comparison: Compares calls.
        probes: Asks blocked members.
        assembly: Revokes groups, and lets their members agree.
        departures: What it means that somebody is gone.
    """

    # In C these are read where they lie: see `Field` in compiled/source/messages/messages.h.
    __slots__ = ("__dict__", "__weakref__", "_closed", "_waiters")

    groups: Groups
    courier: Courier
    dispatch: Dispatch
    delivery: Delivery
    outcomes: Outcomes
    comparison: Comparison
    probes: Probes
    assembly: Assembly
    departures: Departures
    _borrower: Borrower

    def __init__(
        self,
        host: str = "127.0.0.1",
        job_id: str = "",
        spins: int = 0,
        attend_s: float = 0.0,
        heartbeat_s: float = 10.0,
        credentials: Credentials | None = None,
        rings: RingMaker | None = None,
        congestion: str = "reno",
    ) -> None:
        credentials = credentials or Credentials(job_id=job_id)
        self.lock = threading.Lock()
        self.spins = spins
        self.crowd = Crowd()
        self._role = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waiters = 0
        self._background = Background(self.lock, self._is_watched, self._make_progress)
        self._background_polls = False
        self._ring_turns = 0
        self._looks = 0
        self._glanced_ns = 0
        self._called_ns = 0
        self._closed = False
        self._link_watch = LinkWatch(self._look_after_links, attend_s)
        self._mailboxes: dict[int, Mailbox] = {}
        self._epoll = epoll = select.epoll()
        self._presence = Presence(epoll)
        self.linkage = Linkage(epoll, self._presence, self._link_watch.start, heartbeat_s)
        self.linkage.rings.maker, self.linkage.congestion = rings, congestion
        # At hand for who looks at them again and again while it waits.
        self._outgoing, self._heard, self._full = self.linkage.outgoing, self.linkage.heard, self.linkage.full
        self._rings = self.linkage.rings
        try:
            self._reception = Reception(
                host, credentials, self.linkage, self._presence, epoll, self.wake, heartbeat_s
            )
        except BaseException:
            epoll.close()
            raise
        self.card = self._reception.card
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        epoll.register(self._wake_fd, select.EPOLLIN)
        me = self.card.fabric_id
        self._connector = Connector(me, credentials, self.linkage, epoll, heartbeat_s)
        self._put_together()

    def _put_together(self) -> None:
        """Make what messages go through, from those parts that need no other to the one that needs all."""
        linkage, presence, mailboxes = self.linkage, self._presence, self._mailboxes
        connector, absent = self._connector, AbsentGroups()
        courier = self.courier = Courier(linkage, connector, presence)
        outcomes = self.outcomes = Outcomes(linkage, mailboxes)
        assembly = self.assembly = Assembly(courier, outcomes, presence.dead)
        departures = Departures(linkage, presence, outcomes, assembly, mailboxes)
        comparison = self.comparison = Comparison(linkage, courier, outcomes)
        probes = self.probes = Probes(linkage, courier, presence, comparison, departures)
        borrower = self._borrower = Borrower(self.lock, linkage, courier, outcomes, mailboxes)
        delivery = self.delivery = Delivery(courier, outcomes, comparison, borrower)
        dispatch = Dispatch(linkage, connector, presence, courier, outcomes, comparison, delivery)
        others = handlers(assembly, comparison, delivery, departures, dispatch, probes)
        intake = Intake(linkage, presence, outcomes, departures, delivery, mailboxes, absent, others)
        groups = Groups(linkage, presence, courier, outcomes, departures, intake, mailboxes, absent)
        self.departures, self.dispatch, self.groups = departures, dispatch, groups
        linkage.report_to(intake)

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
        for reader in self._rings.readers:  # noqa: SIM110 - `any` of a generator costs three times as much
            if reader is not awaited and reader.has_bytes:
                return True
        return False

    def progress(self, timeout_s: float, borrow_ns: int = _BORROW_BRIEFLY_NS) -> None:
        """Poll once and do what can be done, reading long messages for so long. Only with the role."""
        linkage = self.linkage
        if self._borrower.queue:
            self._borrower.read_until(monotonic_ns() + borrow_ns)
            with self.lock:
                linkage.flush_all()
            timeout_s = 0
        if linkage.rings.links and self._serve_rings(timeout_s > 0):
            self.tell_finished()
            return
        suspects = self._presence.suspects
        events = self._epoll.poll(min(timeout_s, GRACE_S) if suspects else timeout_s)
        with self.lock:
            if timeout_s > 0:
                linkage.rings.doze(False)
            linkage.gathers = True
            try:
                for fd, event in events:
                    self._handle(fd, event)
            finally:
                linkage.gathers = False
            self.departures.resolve()
            self._reception.sweep()
            linkage.flush_all()
        self.tell_finished()

    def _serve_rings(self, sleepy: bool) -> bool:
        """Move what is in rings; where nothing is, and the caller means to sleep, ask to be woken."""
        linkage = self.linkage
        with self.lock:
            moved = linkage.move_rings()
            if not moved and sleepy:
                linkage.rings.doze(True)
                moved = linkage.move_rings()
                if moved:
                    linkage.rings.doze(False)
        # Descriptors have their turn as well while rings are never empty.
        self._ring_turns = self._ring_turns + 1 if moved else 0
        return moved and self._ring_turns % _RING_TURNS != 0

    def _handle(self, fd: int, event: int) -> None:
        link = self.linkage.links.get(fd)
        if link is not None:
            self.linkage.serve(link, event)
        elif fd in self._reception:
            self._reception.serve(fd)
        elif fd == self._wake_fd:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
            self._reception.take_in_adopted()
        elif fd in self._presence:
            self._presence.ended(fd)

    def glance(self) -> None:
        """Take in what has come, if nobody has done so for 5 ms: an operation that never waits
        is to hear of deaths and mismatches as well."""
        self._called_ns = now = monotonic_ns()
        if now - self._glanced_ns >= _GLANCE_NS:
            self._glanced_ns = now
            self.attend()

    def attend(self) -> None:
        """Make what progress there is to make without waiting, unless another thread does."""
        if not self.take_role():
            return
        try:
            self.progress(0)
        finally:
            self.give_role()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has something to do."""
        return self._epoll.fileno()

    def tell_finished(self) -> None:
        """Wake and call back whoever waits for what has been finished. Without the lock."""
        if not self.outcomes.finished:
            return
        with self.lock:
            finished = self.outcomes.collect()
            if self._waiters:
                self._changed.notify_all()
        for message in finished:
            message.tell()

    # One link, for those who read and write it themselves

    def outgoing(self, fabric_id: str) -> Link | None:
        """Return the link that messages to a process go over; None if there is none yet."""
        return self._outgoing.get(fabric_id)

    def heard_from(self, fabric_id: str) -> Link | None:
        """Return the link that short messages of a process come over; None before the first has come."""
        return self._heard.get(fabric_id)

    def ringed_from(self, fabric_id: str) -> Link | None:
        """Return the link whose ring the messages of a process come through, if they come through one."""
        return self._rings.links_from.get(fabric_id)

    @property
    def is_full(self) -> bool:
        """Whether a link has more to write than its socket took."""
        return bool(self._full)

    def press(self) -> None:
        """Write on where a link was full, if one was."""
        if self._full:
            with self.lock:
                for link in list(self._full):
                    self.linkage.flush(link)

    def take_in(self, link: Link, *parts: memoryview) -> None:
        """Take in what who has the role read from a link's socket."""

        def read() -> None:
            for part in parts:
                link.take_in(part)

        linkage = self.linkage
        linkage.gathers = True
        try:
            linkage.read(link, read)
        finally:
            linkage.gathers = False
        linkage.flush_all()

    def read(self, link: Link) -> None:
        """Read what is there. Only with the role."""
        with self.lock:
            if link.fileno() in self.linkage.links:
                self.linkage.read(link)
                self.linkage.flush_all()

    def cut(self, link: Link) -> None:
        """Drop a link of which bytes were lost."""
        with self.lock:
            self.linkage.hang_up(link)

    # Waiting

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
        elif self.linkage.rings.have_bytes(_LOOKS if self.spins else 1):
            self.progress(0, _BORROW_NS)
        else:
            self._looks += 1
            if not self._borrower.queue:
                self.crowd.give_way()
                if self._looks % _RING_TURNS and self.linkage.rings.readers:
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

    # While nobody waits

    def background(self) -> None:
        """See to it that messages make progress though nobody waits for them."""
        with self.lock:
            if not self._closed:
                self._background.start()

    def _is_watched(self) -> bool:
        """Whether somebody is to be called back about a message that nobody waits for."""
        return any(mailbox.watched() for mailbox in self._mailboxes.values())

    def _make_progress(self) -> None:
        """Poll until something comes or somebody wants to wait: those who wait poll for themselves."""
        self.fail_overdue()
        if monotonic_ns() - self._called_ns <= _CALLED_NS or self._waiters or not self.take_role():
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
        with self.lock:
            self.dispatch.fail_overdue(self._mailboxes.values())
        self.tell_finished()

    def _look_after_links(self) -> None:
        self.attend()
        with self.lock:
            self.linkage.drop_silent()
            self.linkage.settle()

    # Other processes

    def watch(self, fd: int, fabric_id: str, departed: Callable[[], bool]) -> None:
        """Hold a process for dead once ``fd`` (a pidfd) is readable, unless it ``departed()`` before."""
        if not self._presence.watches(fd, fabric_id):  # all but the first groups with it
            with self.lock:
                self._presence.watch(fd, fabric_id, departed)

    def has_died(self, fabric_id: str) -> bool:
        """Whether a process is known to have ended, and not in good order."""
        return self._presence.has_died(fabric_id)

    def mark_lost(self, fabric_id: str) -> None:
        """Hold a process for dead: its groups' pending and later messages fail."""
        with self.lock:
            self.departures.process_died(fabric_id)
            self.linkage.flush_all()
        self.tell_finished()
        self.wake()

    # The end

    def close(self) -> None:
        """Send what is queued (for two seconds at most), then close everything. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._reception.stop()
            background = self._background.stop()
            self.groups.end(GroupAbortedError("the links of this process were closed"))
        self._link_watch.stop()
        deadline = time.monotonic() + _FLUSH_S
        with self._role:
            self._say_goodbye(deadline)
            with self.lock:
                for link in self.linkage.links.values():
                    link.discard_incoming()
                self._close_descriptors()
        self.tell_finished()
        if background is not None and background is not threading.current_thread():
            background.join(_FLUSH_S)

    def _say_goodbye(self, deadline: float) -> None:
        """Tell all that this process leaves, and send what is queued, until a monotonic second."""
        linkage = self.linkage
        with self.lock:
            self._reception.let_in_the_last()
            self._connector.drop_calls_for_nothing()
            for link in linkage.links.values():
                link.put(Header(Kind.BYE).encode())
        while time.monotonic() < deadline:
            with self.lock:
                busy = [link for link in linkage.links.values() if not link.idle]
                if not busy:
                    break
                for link in busy:
                    link.discard_incoming()  # two that close at once must not wait for each other
                    linkage.flush(link)
            self._epoll.poll(0.01)

    def _close_descriptors(self) -> None:
        self.linkage.close()
        self._reception.close()
        self._epoll.close()
        # Forgotten first: another thread must not write to what the number stands for next.
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    def forget_in_child(self) -> None:
        """After a fork: close the inherited descriptors, telling nobody."""
        if not self._closed:
            self._closed = True
            self._close_descriptors()
