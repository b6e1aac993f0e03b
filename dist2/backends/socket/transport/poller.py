# cython: annotation_typing=False
"""`Poller`: elects the thread that makes progress for all groups of a process; the others wait.

A thread that waits makes progress for all: one at a time has the poller's role, the others sleep until a
message of theirs is done or the role is free. A background thread takes the role while asynchronous messages
are pending and no thread waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import TypeVar, TypeVarTuple

from cython.cimports.cpython.exc import PyErr_CheckSignals

from dist2.backends.socket.transport.alarm import Alarm
from dist2.backends.socket.transport.links.background import Background
from dist2.backends.socket.transport.links.rings import Rings
from dist2.backends.socket.transport.messages.dispatch import Dispatch
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.rounds import BUSY_ROUNDS, Rounds
from dist2.backends.socket.transport.spinning import Crowd, Spinning
from dist2.runtime.built import check_built
from dist2.runtime.lock import Lock
from dist2.runtime.signals import ctrl_c

check_built(__name__, __file__)

_POLL_S = 0.05
_LOOKS = 20
_GLANCE_NS = 20_000_000
_SELDOM_NS = 100_000_000
"""Time without a poll after which a glance reads the links."""
_CALLED_NS = 2_000_000
"""After a call that posts or waits, it is taken that the next one comes soon, and polls by itself."""


Given = TypeVarTuple("Given")
Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")


class Poller:
    """The poller of one process.

    Args:
        lock: The fabric's lock.
        alarm: Wakes a thread that sleeps in a round.
        rounds: The work of the thread with the role.
        rings: The links' rings.
        dispatch: Fails messages whose time is up.
        outcomes: Messages that have ended.
        mailboxes: The mailboxes of all groups.
        spins: How often a waiter looks before it blocks.
        background: Makes progress on messages that no thread waits for.

    Attributes:
        spins: How often a waiter looks before it blocks.
        crowd: Whether a waiter should block at once.
        role: The lock that the polling thread holds.
        closed: Whether polling has ended.
    """

    def __init__(
        self,
        lock: Lock,
        alarm: Alarm,
        rounds: Rounds,
        rings: Rings,
        dispatch: Dispatch,
        outcomes: Outcomes,
        mailboxes: Mapping[int, Mailbox],
        spins: int,
        background: Background,
    ) -> None:
        self.spins = spins
        self.crowd = Crowd()
        self.role = Lock()
        self.closed = False
        self.wake = alarm.ring
        self._lock = lock
        self._rounds = rounds
        self._rings = rings
        self._dispatch = dispatch
        self._outcomes = outcomes
        self._mailboxes = mailboxes
        self._changed = threading.Condition(lock)
        self._waiters = 0
        self._told = 0  # how often waiters were told that something has changed
        self._background = background
        self._background_polls = False
        self._looks = 0
        self._glanced_ns = 0
        self._called_ns = 0

    @property
    def idle_ns(self) -> int:
        """Time for which threads with the role have slept without arriving data."""
        return self._rounds.idle_ns

    # The role of the polling thread

    def play(
        self, turn: Callable[[*Given], Result], otherwise: Otherwise, *given: *Given
    ) -> Result | Otherwise:
        """Call a function with the poller's role; return its result.

        The role is free again after it, also if signal handlers raise: none runs inside compiled code.

        Args:
            turn: The function.
            otherwise: The result if another thread polls, or this is closed.
            given: Its arguments.
        """
        if self.closed or not self.role.take():
            return otherwise
        try:
            return turn(*given)
        finally:
            try:
                self.role.give()
            finally:
                self.tell_waiters()

    def tell_waiters(self) -> None:
        """Wake the threads that wait for the role, after its release."""
        if self._waiters:
            with self._lock:
                self._tell()

    def _tell(self) -> None:
        self._told += 1
        self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Whether the thread that polls one socket delays another waiter, or data in rings."""
        return bool(self._waiters) or self._rings.have_bytes(1)

    def progress(self, timeout_s: float) -> None:
        """Make a round, and call back for the messages that it has finished. Requires the role."""
        self._rounds.make(timeout_s)
        self.tell_finished()

    def glance(self, seldom: bool = False) -> None:
        """Process arrived frames if no thread has for 20 ms: an operation that never waits must learn of
        deaths and mismatches as well.

        Args:
            seldom: If no thread has for 100 ms.
        """
        self._called_ns = now = monotonic_ns()
        if now - self._glanced_ns >= (_SELDOM_NS if seldom else _GLANCE_NS):
            self._glanced_ns = now
            self.attend()

    def attend(self) -> None:
        """Make progress without waiting, unless another thread does."""
        self.play(self.progress, None, 0)

    def tell_finished(self) -> None:
        """Wake and call back those whose messages are finished. Without the lock."""
        if not self._outcomes.finished:
            return
        with self._lock:
            finished = self._outcomes.collect()
            if self._waiters:
                self._tell()
        for message in finished:
            message.tell()

    # Waiting

    def run_until(
        self, done: Callable[[], bool], deadline_ns: int, interrupted: Callable[[], bool], spins: bool = True
    ) -> bool:
        """Make progress until ``done()``; False if the deadline passes or ``interrupted()`` first.

        Args:
            done: The aim.
            deadline_ns: When to give up.
            interrupted: Whether to give up at once.
            spins: Whether to look for data before sleeping; otherwise the thread sleeps at once.
        """
        wakeful, looked = Spinning(self.spins if spins else 0, self.crowd), False
        while not done():
            if interrupted() or self.closed:
                return False
            PyErr_CheckSignals()  # compiled code runs no signal handlers by itself
            if ctrl_c.pending:
                ctrl_c.look()
            self._called_ns = now = self.crowd.give_way() if looked else monotonic_ns()
            if now >= deadline_ns:
                return False
            left_s, looked = (deadline_ns - now) / 1e9, wakeful.at(now, self._rounds.linkage.is_amid_frame())
            if not self.play(self._poll, False, left_s, looked):
                self._wait_for_role(done, left_s)
        return True

    def _poll(self, left_s: float, awake: bool) -> bool:
        """Make progress once: by looking, or asleep until something comes."""
        if not awake:
            self.progress(min(left_s, _POLL_S))
        elif self._rings.have_bytes(_LOOKS if self.spins else 1):
            self.progress(0)
        else:
            self._looks += 1
            if not (self._looks % BUSY_ROUNDS and self._rings.readers):
                self.progress(0)
        return True

    def _wait_for_role(self, done: Callable[[], bool], left_s: float) -> None:
        """Sleep until a message was completed or the role is free.

        ``done`` may take locks under which other threads take the lock of this object: it is called without
        that, and a change meanwhile is seen by the count.
        """
        with self._lock:
            self._waiters += 1
            told = self._told
        try:
            if self._background_polls:
                self.wake()  # it polls for messages without a waiter
            if done():
                return
            with self._lock:
                # The releasing thread reads `_waiters` after the release; this thread in the opposite order.
                if told == self._told and self.role.locked():
                    self._changed.wait(min(left_s, _POLL_S))
        finally:
            self._waiters -= 1  # one step of compiled code; a handler that raises at the lock would skip it

    # Without waiting threads

    def background(self) -> None:
        """Make progress on messages in the background: no thread waits for them."""
        with self._lock:
            if not self.closed:
                self._background.start()

    def is_watched(self) -> bool:
        """Whether a message without a waiting thread has a callback."""
        return any(mailbox.watched() for mailbox in self._mailboxes.values())

    def make_progress(self) -> None:
        """Poll until an event, or until another thread wants to wait: waiters poll themselves."""
        self.fail_overdue()
        if monotonic_ns() - self._called_ns > _CALLED_NS and not self._waiters:
            self.play(self._poll_for_others, None)

    def _poll_for_others(self) -> None:
        """Make progress asleep; a thread that comes to wait wakes this one."""
        self._background_polls = True
        try:
            if not self._waiters:
                self.progress(_POLL_S)
        finally:
            self._background_polls = False

    def fail_overdue(self) -> None:
        """Fail the asynchronous messages whose deadline has passed, and those of aborted groups."""
        with self._lock:
            self._dispatch.fail_overdue(self._mailboxes.values())
        self.tell_finished()
