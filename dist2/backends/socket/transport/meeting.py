"""`Meeting`: how the members of a board find each other's regions, before they come to a fence."""

from __future__ import annotations

from dist2.backends.socket.transport.arrivals import MET, AnyArrivals
from dist2.backends.socket.transport.regions import Regions
from dist2.backends.socket.transport.roster import Member, Roster
from dist2.backends.socket.transport.waiting import Waiting
from dist2.operation import Operation

_YIELD_NS = 200_000


class Meeting:
    """Of one group, on the part of one member. Whom it finds the arrivals and the roster get to know.

    Args:
        regions: Where the members write; this one's is there.
        own: Its control words.
        arrivals: By which it comes to fences.
        roster: Of the members.
        waiting: For them.
    """

    def __init__(
        self, regions: Regions, own: memoryview, arrivals: AnyArrivals, roster: Roster, waiting: Waiting
    ) -> None:
        self._regions = regions
        self._own = own
        self._arrivals = arrivals
        self._roster = roster
        self._waiting = waiting
        self._is_over = not roster.members
        self._ring_all()  # whoever came first sleeps until this region is there

    def meet(self, operation: Operation) -> None:
        """Find the regions of all members; returns at once when they are known.

        It waits until all have done so. A member that waits for nobody in its operations might have left
        else, and taken its region with it, before others have found that.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError.
        """
        if self._is_over:
            return
        self._waiting.sleep_until(
            self._have_met,
            operation,
            lambda: [member.rank for member in self._unmet()] or self._unacquainted(),
            patience_ns=_YIELD_NS,
        )
        self._is_over = True

    def look_up(self) -> bool:
        """Find what regions there are; return whether these are all."""
        for member in self._unmet():
            if not self._regions.find(member.rank, member.neighbour):
                return False
            words = self._regions.words(member.rank)
            self._roster.add(member, words)
            self._arrivals.add(member.rank, words, member.neighbour.doorbell)
        return True

    def _have_met(self) -> bool:
        """Whether all members have found all others."""
        if not self._own[MET]:
            if not self.look_up():
                return False
            self._own[MET] = 1
            self._ring_all()
        return not self._unacquainted()

    def _unmet(self) -> list[Member]:
        return [member for member in self._roster.members if member.rank not in self._regions]

    def _unacquainted(self) -> list[int]:
        """Return the members found that have not found all others."""
        return [member.rank for words, member in self._roster.peers if not words[MET]]

    def _ring_all(self) -> None:
        for member in self._roster.members:
            member.neighbour.doorbell.ring()
