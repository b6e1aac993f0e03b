"""`Roster`: the members of a board, and which of them have failed or left.

Each member publishes in its control words whether it is in the group, or has left, aborted or revoked it, or
has given up an operation. If a process ends without doing so, its pidfd shows it. If this member itself has
left, aborted or revoked, its own waits end from then on.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic_ns

import attrs

from dist2.backends.socket.transport.boards.control_words import SEQ, SLEEPING, STATE
from dist2.backends.socket.transport.doorbell import Doorbell
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.explaining import left_words
from dist2.backends.socket.transport.shared_memory import Neighbour
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.operation.engine import Arrivals
from dist2.operation.record import Operation
from dist2.runtime.rank_names import RANKS, RankNames

_OPEN, _CLOSED, _ABORTED, _REVOKED, _TIMED_OUT, _CLOSED_LATE = 0, 1, 2, 3, 4, 5
_INSIDE = (_OPEN, _TIMED_OUT)
_LEFT = (_CLOSED, _CLOSED_LATE)
"""Closed in good order, or with a report: of an operation that it had given up, or of a reason."""
_REPORTED = (_ABORTED, _CLOSED_LATE)
_STATE_BITS = 8
# Above them: the revoking rank; or the missing rank plus 1, and above it the operation's number.
_STATE_MASK = (1 << _STATE_BITS) - 1
_RANK_BITS, _SEQ_BITS = 16, 40


@attrs.frozen
class Member:
    """Another member of the group on this host.

    Attributes:
        rank: Its group rank.
        neighbour: Its process.
    """

    rank: int
    neighbour: Neighbour


Peers = Sequence[tuple[memoryview, Member]]
"""The other members that were met, each with its control words: more of them as time goes on."""


class Roster:
    """The state of all members, as one of them sees it.

    Attributes:
        members: The other ones.
        peers: The ones among them that were met: see `meeting`.
        messages: The group's messages, by which a member may have said why it left.
        names: Names the members in texts.
        reports: Members that miss this one when it has left should wait a moment for the reason.

    Args:
        members: As above.
        own: This member's control words.
        arrivals: How this member waits at fences.
        doorbell: The doorbell of this member's process.
        has_left: Tells whether a member that was not met has left the group.
        has_aborted: Tells whether it has aborted it.
    """

    def __init__(
        self,
        members: Sequence[Member],
        own: memoryview,
        arrivals: Arrivals,
        doorbell: Doorbell,
        has_left: Callable[[Neighbour], bool],
        has_aborted: Callable[[Neighbour], bool],
        names: RankNames = RANKS,
    ) -> None:
        self.names = names
        self.members = tuple(members)
        self._peers: list[tuple[memoryview, Member]] = []
        self.peers: Peers = self._peers
        self.messages: FabricEndpoint | None = None
        self.reports = False
        self._own = own
        self._arrivals = arrivals
        self._doorbell = doorbell
        self._has_left = has_left
        self._has_aborted = has_aborted
        self._lives: select.poll | None = None
        self._watched = 0
        self._fault: Dist2Error | None = None

    def add(self, member: Member, words: memoryview) -> None:
        """Take in that a member was met."""
        self._peers.append((words, member))

    # The states of members

    def is_troubled(self) -> bool:
        """Whether a member is known to have failed or left; `check` raises if it matters."""
        troubled = any(words[STATE] for words, _ in self._peers)
        return self._fault is not None or troubled or self._has_ended()

    def _has_ended(self) -> bool:
        """Whether the process of any member has."""
        if self._lives is None:
            self._lives = select.poll()
        for _, member in self._peers[self._watched :]:
            if member.neighbour.fileno() >= 0:
                self._lives.register(member.neighbour.fileno(), select.POLLIN)
            self._watched += 1
        return bool(self._lives.poll(0))

    def pidfds(self) -> list[int]:
        """Return the descriptors that are readable once a member in the group has ended.

        Those of members that have left would be readable for good: they rang as they left.
        """
        return [
            member.neighbour.fileno()
            for words, member in self._peers
            if words[STATE] & _STATE_MASK in _INSIDE and member.neighbour.fileno() >= 0
        ]

    def lost(self) -> dict[int, str]:
        """Return the group ranks that are known to have died, and how each ended, in words."""
        states = self._states()
        return {
            member.rank: member.neighbour.end()
            for member in self.members
            if states.get(member.rank, _OPEN) & _STATE_MASK in _INSIDE and member.neighbour.is_dead()
        }

    def called(self) -> dict[int, int]:
        """Return the number of the last operation of each other member that was met."""
        return {member.rank: words[SEQ] for words, member in self._peers}

    def departed(self, aborted_only: bool = False) -> list[int]:
        """Return the members that are known to have closed or aborted the group."""
        states = (_ABORTED,) if aborted_only else (*_LEFT, _ABORTED)
        return [rank for rank, state in self._states().items() if state in states]

    def check(self, missing: Callable[[], list[int]], operation: Operation) -> list[int]:
        """Return the absent members, if waiting for them makes sense.

        Args:
            missing: Returns the awaited members that have not come.
            operation: The operation that waits.

        Raises:
            GroupAbortedError, GroupRevokedError: This member has ended the group, or a member revoked it.
            PeerLostError: A member has died, or one that is absent has left or aborted the group.
            OperationTimeoutError: All absent members gave up an earlier operation.
        """
        if self._fault is not None:
            raise self._fault
        absent = missing()
        states = self._states()
        revoked = [state >> _STATE_BITS for state in states.values() if state & _STATE_MASK == _REVOKED]
        if revoked:
            self._hear_out(revoked, ())
            by = revoked[0]
            raise GroupRevokedError(f"the group was revoked by {self.names([by])}", by=by)
        died = self.lost()
        if died:
            raise PeerLostError(self.names.ended(died), ranks=list(died))
        gone = self._left(absent, states)
        if gone:
            self._hear_out(self._left(gone, states, *_REPORTED), self._left(gone, states, _CLOSED))
            raise self._left_error(gone, states)
        self._check_timed_out({rank: states.get(rank, _OPEN) for rank in absent}, operation)
        return absent

    @staticmethod
    def _left(ranks: Sequence[int], states: Mapping[int, int], *kinds: int) -> list[int]:
        """Return those of some ranks that have left the group, in any way or in one."""
        return [rank for rank in ranks if states.get(rank) in (kinds or (*_LEFT, _ABORTED))]

    def _left_error(self, gone: Sequence[int], states: Mapping[int, int]) -> PeerLostError:
        """Return the error of a wait for members that have left, some of them perhaps because of others."""
        first = gone if self.messages is None else self.messages.first_of(gone)
        left = self._left(first, states, *_LEFT)
        ranks = left or first
        words = left_words(self._why(left)) if left else f"aborted the group{self._why(ranks)}"
        lost = ranks if self.messages is None else self.messages.first_lost(ranks)
        return PeerLostError(f"{self.names(ranks)} {words}", ranks=lost)

    def _check_timed_out(self, absent: Mapping[int, int], operation: Operation) -> None:
        """Raise if all absent members, given with their states, have given up an earlier operation."""
        said = [state >> _STATE_BITS for state in absent.values() if state & _STATE_MASK == _TIMED_OUT]
        if not said or len(said) < len(absent) or operation.seq <= max(said) >> _RANK_BITS:
            return
        missing = sorted({each % (1 << _RANK_BITS) - 1 for each in said} - {-1})
        why = f": {self.names(missing)} did not arrive in time there" if missing else ""
        raise OperationTimeoutError(
            f"{self.names(list(absent))} gave up an earlier operation{why}",
            missing=missing,
            timeout_s=operation.timeout_s,
            elapsed_s=(monotonic_ns() - operation.created_ns) / 1e9,
        )

    def _states(self) -> dict[int, int]:
        states = {member.rank: words[STATE] for words, member in self._peers}
        if len(states) < len(self.members):
            unmet = [member for member in self.members if member.rank not in states]
            for each in unmet:
                if self._has_left(each.neighbour):
                    states[each.rank] = _ABORTED if self._has_aborted(each.neighbour) else _CLOSED
        return states

    def _why(self, ranks: Sequence[int]) -> str:
        return "" if self.messages is None else self.messages.why(ranks)

    def _hear_out(self, ranks: Sequence[int], left: Sequence[int]) -> None:
        """Take in by messages why members are gone; raise if the group has failed for a better reason."""
        if self.messages is not None:
            self.messages.hear_out(ranks, left)

    # The end

    def abort(self, error: Dist2Error) -> None:
        """Make a blocked wait raise. Safe in signal handlers: sets fields and rings bells."""
        self._fault = error
        self._arrivals.stopped = True
        if self._own[STATE] & _STATE_MASK != _REVOKED:
            self._own[STATE] = _ABORTED
        self._wake_all()

    def revoke(self, error: GroupRevokedError) -> None:
        """Make a blocked wait raise, here and on all other members."""
        self._fault = self._fault or error
        self._arrivals.stopped = True
        self._own[STATE] = _REVOKED | error.by << _STATE_BITS
        self._wake_all()

    def time_out(self, missing: Sequence[int], seq: int) -> None:
        """Have members that call later operations learn that this one has given up an operation.

        Args:
            missing: The ranks that did not arrive.
            seq: Its number; 0 for a message.
        """
        if self._own[STATE] == _OPEN:
            rank = min(missing, default=-1) + 1
            above = rank % (1 << _RANK_BITS) | seq % (1 << _SEQ_BITS) << _RANK_BITS
            self._own[STATE] = _TIMED_OUT | above << _STATE_BITS
            self._wake_others()

    def leave(self) -> None:
        """Have members that still wait for this one learn that it left."""
        state = self._own[STATE] & _STATE_MASK
        if state in _INSIDE:
            self._own[STATE] = _CLOSED_LATE if self.reports or state == _TIMED_OUT else _CLOSED
        self._fault = self._fault or GroupAbortedError("the group was closed")
        self._arrivals.stopped = True
        self._wake_others()

    def has_aborted(self) -> bool:
        """Whether this member has aborted the group."""
        return self._own[STATE] & _STATE_MASK == _ABORTED

    def _wake_all(self) -> None:
        with suppress(OSError):
            self._doorbell.ring()
        self._wake_others()

    def _wake_others(self) -> None:
        self._arrivals.order()  # the state is out before naps are read
        for words, member in self._peers:
            if words[SLEEPING]:
                member.neighbour.doorbell.ring()
