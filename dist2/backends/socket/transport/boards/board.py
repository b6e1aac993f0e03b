"""`Board`: fences of the members of a group on one host, in shared memory.

A *fence* is the only synchronisation for data: a member publishes a word made of the fence's number and the
operation's fingerprint, then waits until every other member's word is the same, or until one's is, or not at
all. One comparison shows that a peer has arrived *and* that it made the same call. Publishing and the first
milliseconds of waiting are done by `Arrivals`. The other parts of a board are:

    regions     the members' shared memory, and its layout
    meeting     how members find each other's regions
    roster      the state of each member: in the group, left, aborted, revoked or died
    mismatches  the members' calls, and the error if they differ
    waiting     sleeps until a condition holds, a member is lost, or the deadline passes

Operations in which all wait for all use the slot halves in turn: a member that has passed the second fence
knows that all have come to it, and so have finished their reads of the first half. Other operations claim
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.transport.boards.arrivals import new_arrivals
from dist2.backends.socket.transport.boards.control_words import ALL, NOBODY, entry_at
from dist2.backends.socket.transport.boards.meeting import Meeting
from dist2.backends.socket.transport.boards.mismatches import Mismatches
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES, Regions, slot_offset
from dist2.backends.socket.transport.boards.roster import Member, Roster
from dist2.backends.socket.transport.boards.waiting import Waiting
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.shared_memory import SharedHost
from dist2.errors import Dist2Error
from dist2.operation.record import Operation
from dist2.runtime.rank_names import RANKS, RankNames


class Board:
    """A group's shared memory, as one of its members sees it.

    Attributes:
        rank: The caller's group rank.
        names: Names the members in texts.
        members: The others.
        regions: Where they write; call `meet` first to find those of the others.
        arrivals: How this member comes to fences.
        roster: The states of members.
        mismatches: The calls of members, if they differ.
        meeting: How the members find each other.
        progress: Has its turns while this member waits: the messages of a group on several hosts.

    Args:
        host: The shared memory of this process.
        context: The group's context id; the same on all members.
        rank: As above.
        members: As above.
        spins: How often a wait looks before it yields.
        slot_size: Bytes of a slot half.
        names: Names the members in texts.
    """

    def __init__(
        self,
        host: SharedHost,
        context: int,
        rank: int,
        members: Sequence[Member],
        spins: int,
        slot_size: int = SLOT_BYTES,
        names: RankNames = RANKS,
    ) -> None:
        self.rank = rank
        self.names = names
        self.progress: FabricEndpoint | None = None
        self.regions = Regions(host, context, rank, slot_size)
        own = self._own = self.regions.words(rank)
        arrivals = self.arrivals = new_arrivals(
            rank, own, host.doorbell, 1 + len(members), spins, (slot_offset(0), slot_offset(1, slot_size))
        )
        roster = self.roster = Roster(
            members, own, arrivals, host.doorbell, self.regions.has_left, self.regions.has_aborted, names
        )
        self.members = roster.members
        self._peers = roster.peers
        self.mismatches = Mismatches(rank, own, self.regions, arrivals, roster.peers, names)
        self._waiting = Waiting(own, arrivals, host.doorbell, roster, self.mismatches)
        self.meeting = Meeting(host, self.regions, own, arrivals, roster, self._waiting)
        self._closed = False

    def listen(self, messages: FabricEndpoint) -> None:
        """Let a group's messages have their turns once this member has waited for a while.

        A failure that messages report, a mismatch for example, ends its wait.
        """
        self.roster.messages = messages

    def meet(self, operation: Operation, fence_follows: bool = False) -> None:
        """Find the regions of all members: see `Meeting.meet`."""
        self.meeting.meet(operation, fence_follows)

    @property
    def turn(self) -> int:
        """Which slot half the next block uses: 0 or 1."""
        turn: int = self.arrivals.turn
        return turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self.arrivals.turn = turn

    @property
    def phase(self) -> int:
        """Number of the fence that was passed last."""
        phase: int = self.arrivals.phase
        return phase

    # Fences

    def fence(self, operation: Operation, whom: int = ALL, number: int = 0) -> None:
        """Arrive at the next fence; return when the awaited members are there, with the same call.

        Their earlier writes are then visible to this member.

        Args:
            operation: The call of this member.
            whom: All, or one other member, or `NOBODY`.
            number: Published with the fence; see `noted`. If not all are awaited, the call is published.

        Raises:
            MismatchError: A member is here with another operation.
            OperationTimeoutError: The deadline passed; `missing` has the missing ranks.
            PeerLostError: A member died or left.
            GroupAbortedError: `Roster.abort` was called.
        """
        if whom != ALL:
            number = self.log_call(operation)
        self.arrivals.cross(operation, self, whom, None, number)

    def log_call(self, operation: Operation) -> int:
        """Log a call of this member, which may have gone on when another one asks; return its number."""
        return self.mismatches.log_call(operation)

    def noted(self) -> list[int]:
        """Return the numbers of the other members at the last fence; read before the next one."""
        return [words[entry_at(self.arrivals.phase) + 1] for words, _ in self._peers]

    def published(self, own: int) -> list[int]:
        """Return the numbers of all members at the last fence, by rank; the caller's is given."""
        ranks = [member.rank for _, member in self._peers]
        by_rank = {**dict(zip(ranks, self.noted(), strict=True)), self.rank: own}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def share(self, operation: Operation, number: int) -> list[int]:
        """Return a number of each member, by rank, which they publish with a fence; raises as `fence`."""
        self.fence(operation, number=number)
        return self.published(number)

    # Waiting

    def wait(self, operation: Operation) -> None:
        """Sleep until the members that the arrivals wait for are at a fence; raises as `fence`."""
        whom, phase = self.arrivals.whom, self.arrivals.sought
        if whom == NOBODY:
            self._look(operation)
            return
        self._waiting.sleep_until(
            lambda: self._have_come(whom, phase), operation, lambda: self._absent(whom, phase)
        )

    def attend(self, operation: Operation) -> None:
        """Give the messages of a group on several hosts a turn; raise the failures that they report."""
        if self.progress is not None:
            self._waiting.attend(self.progress, operation)

    def check(self, operation: Operation, rank: int) -> None:
        """Raise the error of a fence that waits for a failed member (died, left or aborted); or return."""
        self._waiting.check(lambda: [rank], operation)

    def _look(self, operation: Operation) -> None:
        """Raise if the group has failed, as far as can be known without waiting."""
        self._waiting.hear(operation)
        self.mismatches.compare()
        if self.roster.is_troubled():
            self.roster.check(lambda: self._absent(ALL, self.arrivals.phase), operation)

    def _have_come(self, whom: int, phase: int) -> bool:
        """Whether the awaited members have come to a fence; raises if any made another call."""
        self.mismatches.compare()
        return not self._absent(whom, phase)

    def _absent(self, whom: int, phase: int) -> list[int]:
        """Return the awaited members that have not come to a fence with the same operation."""
        at = entry_at(phase)
        return [
            member.rank
            for words, member in self._peers
            if whom in (ALL, member.rank) and words[at] != self._own[at]
        ]

    def abort(self, error: Dist2Error) -> None:
        """Make a blocked wait raise, and notify the other members; a closed board stays closed."""
        if not self._closed:
            self.roster.abort(error)

    def close(self) -> None:
        """Leave: members that still wait for this one learn that it left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.roster.leave()
        neighbours = [member.neighbour for member in self.members]
        self.regions.leave(neighbours, self.meeting.all_have_met(), self.roster.has_aborted())
