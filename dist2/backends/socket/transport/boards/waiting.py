"""`Waiting`: sleeps until other members arrive, after `Arrivals` has polled and yielded in vain.

It sleeps in the kernel on its doorbell, on the pidfds of the others and on the group's messages, looks again
after every wake-up, and raises once the group has failed or the time is up.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from dist2.backends.socket.transport.boards.control_words import SLEEPING
from dist2.backends.socket.transport.boards.mismatches import Mismatches
from dist2.backends.socket.transport.boards.roster import Roster
from dist2.backends.socket.transport.doorbell import Doorbell
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.explaining import absence
from dist2.backends.socket.transport.spinning import yield_core
from dist2.errors import MismatchError
from dist2.operation.engine import Arrivals
from dist2.operation.record import Operation
from dist2.runtime.deadline import extended, monotonic_ns, note_wait
from dist2.runtime.signals import ctrl_c

_SLEEP_MS = 20
_LONGEST_SLEEP_MS = 100


def sleep_ms(waited_ns: int, left_ns: int) -> float:
    """Return how long a sleep may be, in milliseconds.

    After a while that is a tenth of the time waited so far: 64 ranks that look 50 times a second would take
    a core from the rank that they wait for.
    """
    longest_ms = min(_LONGEST_SLEEP_MS, max(_SLEEP_MS, waited_ns / 1e7))
    return max(0.0, min(longest_ms, left_ns / 1e6))


class Waiting:
    """The waits of one member for others.

    Args:
        own: Its control words.
        arrivals: This member's arrivals at fences.
        doorbell: The doorbell of this member's process.
        roster: The states of members; its messages make progress while this member waits.
        mismatches: The members' calls, if they differ.
    """

    def __init__(
        self,
        own: memoryview,
        arrivals: Arrivals,
        doorbell: Doorbell,
        roster: Roster,
        mismatches: Mismatches,
    ) -> None:
        self._own = own
        self._arrivals = arrivals
        self._doorbell = doorbell
        self._roster = roster
        self._mismatches = mismatches

    def give_way_until(self, arrived: Callable[[], bool], patience_ns: int) -> bool:
        """Yield the core until something is the case; False if it is not after a while.

        Args:
            arrived: Whether it is.
            patience_ns: How long to yield at most.
        """
        end = monotonic_ns() + patience_ns
        while not arrived():
            if self._arrivals.sleepy or monotonic_ns() > end:
                return False
            yield_core()
        return True

    def sleep_until(
        self, arrived: Callable[[], bool], operation: Operation, missing: Callable[[], list[int]]
    ) -> None:
        """Sleep on the doorbell until something is the case.

        Args:
            arrived: Whether it is.
            operation: The operation that waits.
            missing: The awaited members.

        Raises:
            Dist2Error: As `check`, and errors of ``arrived``.
        """
        while not arrived():
            if ctrl_c.pending:
                ctrl_c.look()
            self.hear(operation)
            self._sleep(arrived, operation, missing)

    def hear(self, operation: Operation) -> None:
        """Make progress on the group's messages, if any; raise the failures that they report."""
        if self._roster.messages is not None:
            self.attend(self._roster.messages, operation)

    def attend(self, messages: FabricEndpoint, operation: Operation) -> None:
        """Make progress on some messages; raise the failures that they report."""
        try:
            messages.attend()
        except MismatchError:  # members that find the mismatch at the fence ask for this member's call
            self._mismatches.publish(operation.call(), self._arrivals.phase)
            raise

    def check(self, missing: Callable[[], list[int]], operation: Operation) -> None:
        """Raise if missing members have failed, or the deadline has passed; or return.

        Raises:
            GroupAbortedError, GroupRevokedError, PeerLostError: As `Roster.check`.
            OperationTimeoutError: The deadline has passed.
        """
        absent = self._roster.check(missing, operation)
        if monotonic_ns() >= extended(operation.deadline_ns):
            late = self._late(absent, operation)
            raise absence(late, self._last_seen(late), self._roster.names)

    def _late(self, absent: list[int], operation: Operation) -> list[int]:
        """Return the members that have not called an operation, as far as is known.

        Where all awaited members of this host have, they wait for members of other hosts. If nothing is known
        of those, return the awaited ones.
        """
        here = self._roster.called()
        late = [rank for rank in absent if here.get(rank, 0) < operation.seq]
        if not late and self._roster.messages is not None:
            late = [rank for rank in self._roster.messages.behind(operation.seq) if rank not in here]
        return late or absent

    def _last_seen(self, ranks: list[int]) -> dict[int, str]:
        if self._roster.messages is not None:
            return self._roster.messages.last_seen(ranks)
        return {rank: self._mismatches.last_seen(rank) for rank in ranks}

    def seek(self, ranks: list[int]) -> None:
        """Ask members whose regions are not there whether they have made the group at all."""
        if self._roster.messages is not None:
            self._roster.messages.seek(ranks)

    def _sleep(
        self, arrived: Callable[[], bool], operation: Operation, missing: Callable[[], list[int]]
    ) -> None:
        arrivals, messages = self._arrivals, self._roster.messages
        bell, rung = self._doorbell.bell, False
        try:
            bell.enter()  # in here, as a signal handler may raise behind it
            self._own[SLEEPING] = arrivals.sleeping_word()
            arrivals.order()  # the nap is out before words and states of the others are read again
            if arrived():
                return
            self.check(missing, operation)
            now_ns = monotonic_ns()
            longest_ms = sleep_ms(now_ns - operation.started_ns, extended(operation.deadline_ns) - now_ns)
            poll = select.poll()
            poll.register(self._doorbell.fileno(), select.POLLIN)
            if messages is not None:
                poll.register(messages.fileno(), select.POLLIN)
            for pidfd in self._roster.pidfds():
                poll.register(pidfd, select.POLLIN)
            rung = any(fd == self._doorbell.fileno() for fd, _ in poll.poll(longest_ms))
            note_wait(now_ns, now_ns + int(longest_ms * 1e6))
        finally:
            self._own[SLEEPING] = 0
            before = bell.leave()
        if rung and not arrived():
            bell.await_reading(before)
