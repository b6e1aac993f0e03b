"""`Meeting`: the members of a board map each other's regions before the first fence."""

from __future__ import annotations

from dist2.backends.socket.transport.boards.control_words import MET, SLEEPING
from dist2.backends.socket.transport.boards.regions import Regions
from dist2.backends.socket.transport.boards.roster import Member, Roster
from dist2.backends.socket.transport.boards.waiting import Waiting
from dist2.backends.socket.transport.shared_memory import SharedHost
from dist2.operation.engine import Arrivals
from dist2.operation.record import Operation

_YIELD_NS = 2_000_000
"""How long to give way before sleeping: members on the same core are about to make their part."""


class Meeting:
    """Finds the other members of a group, and adds them to the arrivals and the roster.

    Args:
        host: The shared memory of this process.
        regions: Where the members write; this one's is there.
        own: Its control words.
        arrivals: How this member comes to fences.
        roster: The states of members.
        waiting: For them.
    """

    def __init__(
        self,
        host: SharedHost,
        regions: Regions,
        own: memoryview,
        arrivals: Arrivals,
        roster: Roster,
        waiting: Waiting,
    ) -> None:
        self._host = host
        self._regions = regions
        self._own = own
        self._arrivals = arrivals
        self._roster = roster
        self._waiting = waiting
        self._unmet: list[Member] = list(roster.members)
        self._is_over = not self._unmet
        arrivals.order()  # the region is published: a member that sleeps from now on finds it first
        for member in roster.members:
            if member.neighbour.awaits_regions():
                member.neighbour.doorbell.ring()

    def meet(self, operation: Operation, fence_follows: bool = False) -> None:
        """Find the regions of all members; returns at once when they are known.

        It waits until all have done so. Otherwise a member that waits for none in its operations might leave,
        and remove its region, before others have found that region.

        Args:
            operation: The call of this member.
            fence_follows: The next step is a fence at which all wait for all, and no member arrives there
                without having found all regions. Then it waits only until this member has found them.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError.
        """
        if self._is_over:
            return
        if not self._waiting.give_way_until(self._look_at_one, _YIELD_NS):
            with self._host.awaiting_regions():
                self._waiting.sleep_until(
                    self.look_up, operation, lambda: [each.rank for each in self._unmet]
                )
        if fence_follows:
            return
        if not self._arrivals.phase and not self._waiting.give_way_until(self.all_have_met, _YIELD_NS):
            self._waiting.sleep_until(self.all_have_met, operation, self._unacquainted)
        self._is_over = True

    def look_up(self) -> bool:
        """Find the regions of members; return whether these are all, and notify the others if so."""
        if not self._unmet:
            return True
        missing = []
        for member in self._unmet:  # looked for again and again, on a core that others may want
            words = self._regions.find(member.rank, member.neighbour)
            if words is None:
                missing.append(member)
            else:
                self._roster.add(member, words)
                self._arrivals.add(member.rank, words, member.neighbour.doorbell)
        self._unmet = missing
        if missing:
            self._waiting.seek([member.rank for member in missing])
            return False
        self._own[MET] = 1
        self._arrivals.order()
        for words, member in self._roster.peers:
            if words[SLEEPING]:
                member.neighbour.doorbell.ring()
        return True

    def _look_at_one(self) -> bool:
        """`look_up`, but only once one of the missing members has come.

        All other members on its core wait for the work of a member between two yields.
        """
        unmet = self._unmet
        return (not unmet or self._regions.is_there(unmet[-1].neighbour)) and self.look_up()

    def _unacquainted(self) -> list[int]:
        """Return the members found that have not found all others."""
        return [member.rank for words, member in self._roster.peers if not words[MET]]

    def all_have_met(self) -> bool:
        """Whether all members have found all regions, as far as this one knows."""
        return not self._unmet and not self._unacquainted()
