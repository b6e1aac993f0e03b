"""`Board`: where the members of a group on one host meet in shared memory.

Each member has a region: control words, then memory for data, `Pieces` and two slot halves. A *fence* is the
one synchronisation there is: a member publishes a word made of the fence's number and the operation's
fingerprint, then waits until every other member's word is the same, or until one's is, or not at all. One
comparison tells that a peer has arrived *and* that it called the same thing. Publishing and the first
milliseconds of waiting are done by `Arrivals`; whatever takes longer, or goes wrong, is dealt with here.

Operations in which all wait for all use the slot halves in turn: who has passed the second fence knows that
all have come to it, and so have read what they wanted of the first half. The others claim pieces.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import Protocol

import attrs

from dist2.backends.socket.transport.arrivals import (
    ALL,
    DESCRIBED,
    GAVE_UP,
    MET,
    NOBODY,
    NOTES,
    PHASES,
    PRINT_BITS,
    RING,
    SEQ,
    SLEEPING,
    STATE,
    WINDOW,
    WORDS,
    new_arrivals,
    sleeping_word,
)
from dist2.backends.socket.transport.explaining import absence, mismatch
from dist2.backends.socket.transport.inscriptions import INSCRIPTIONS_BYTES
from dist2.backends.socket.transport.pieces import CONTROL_BYTES, PIECES_END
from dist2.backends.socket.transport.shared_memory import Neighbour, Region, SharedHost
from dist2.backends.socket.transport.testimony import TEXT_AT, TEXT_BYTES, Testimony
from dist2.backends.socket.transport.wakefulness import yield_core
from dist2.call import Call
from dist2.ctrl_c import ctrl_c
from dist2.errors import Dist2Error, GroupAbortedError, GroupRevokedError, MismatchError, PeerLostError
from dist2.operation import Operation

SLOT_BYTES = 1 << 20
"""Each half of a member's slot. Larger operations go through in blocks."""

LENDING_AT, LENDING_BYTES = TEXT_AT + TEXT_BYTES, CONTROL_BYTES - TEXT_AT - TEXT_BYTES
"""Where in a member's control page it says what it lends: see `lending`."""
_OPEN, _CLOSED, _ABORTED, _REVOKED = 0, 1, 2, 3
_STATE_BITS = 8  # above them, who revoked
_STATE_MASK = (1 << _STATE_BITS) - 1

_SLEEP_MS = 20
_MEETING_YIELD_NS = 200_000
_EXPLAIN_S = 0.3
_HEAR_S = 0.05


class Companion(Protocol):
    """What must go on while members of a host wait for each other."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has something to do."""

    def attend(self) -> None:
        """Do it, without waiting; raise if the group has failed."""

    def why(self, ranks: Iterable[int]) -> str:
        """Return what members said broke the group for them, to go behind what they did."""


@attrs.frozen
class Member:
    """Another member of the group on this host.

    Attributes:
        rank: Its group rank.
        neighbour: Its process.
    """

    rank: int
    neighbour: Neighbour


class Board:
    """A group's shared memory, as one of its members sees it.

    Attributes:
        rank: The caller's group rank.
        members: The others.
        slot_size: Bytes of a slot half.
        companion: Has its turns while this member waits: the messages of a group on several hosts.
        arrivals: By which this member comes to fences.
        messages: Has its turns once this member has waited for a while: what is found out by messages (that
            ranks differ, say) ends its waiting.
    """

    def __init__(
        self,
        host: SharedHost,
        context: int,
        rank: int,
        members: Sequence[Member],
        spins: int,
        slot_size: int = SLOT_BYTES,
    ) -> None:
        self.rank = rank
        self.slot_size = slot_size
        self.companion: Companion | None = None
        self.messages: Companion | None = None
        inscriptions_at = PIECES_END + 2 * slot_size
        self._region_bytes = inscriptions_at + INSCRIPTIONS_BYTES
        self._host = host
        self._context = context
        self.members = tuple(members)
        self._abort: Dist2Error | None = None
        self._closed = False
        self._region = host.join(context, self._region_bytes)
        self._own = self._words(self._region)
        self.arrivals = new_arrivals(rank, self._own, host.doorbell, 1 + len(members), spins)
        self._lives = select.poll()
        self._regions: dict[int, Region] = {rank: self._region}
        self._testimony = Testimony(rank, self._own, self._regions, inscriptions_at)
        self._peers: list[tuple[memoryview, Member]] = []
        self._found = not members
        for member in members:  # whoever came first sleeps until this region is there
            member.neighbour.doorbell.ring()

    @staticmethod
    def _words(region: Region) -> memoryview:
        return region.mapping.words(region.offset, WORDS)

    # Meeting

    def meet(self, operation: Operation) -> None:
        """Find the regions of all members; returns at once when they are known.

        It waits until all have done so. A member that waits for nobody in its operations might have left
        else, and taken its region with it, before others have found that.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError.
        """
        if self._found:
            return
        self._sleep_until(
            self._have_met,
            operation,
            lambda: [member.rank for member in self._unmet()] or self._unacquainted(),
            patience_ns=_MEETING_YIELD_NS,
        )
        self._found = True

    def _have_met(self) -> bool:
        """Whether all members have found all others."""
        if not self._own[MET]:
            if not self._look_up():
                return False
            self._own[MET] = 1
            for member in self.members:
                member.neighbour.doorbell.ring()
        return not self._unacquainted()

    def _unacquainted(self) -> list[int]:
        """Return the members found that have not found all others."""
        return [member.rank for words, member in self._peers if not words[MET]]

    def _look_up(self) -> bool:
        """Find what regions there are; return whether these are all."""
        for member in self._unmet():
            region = member.neighbour.find(self._context, self._region_bytes)
            if region is None:
                return False
            self._regions[member.rank] = region
            words = self._words(region)
            self._peers.append((words, member))
            self.arrivals.add(member.rank, words, member.neighbour.doorbell)
            if member.neighbour.fileno() >= 0:
                self._lives.register(member.neighbour.fileno(), select.POLLIN)
        return True

    def _unmet(self) -> list[Member]:
        return [member for member in self.members if member.rank not in self._regions]

    @property
    def turn(self) -> int:
        """Which slot half the next block uses: 0 or 1."""
        return self.arrivals.turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self.arrivals.turn = turn

    @property
    def phase(self) -> int:
        """Number of the fence that was passed last."""
        return self.arrivals.phase

    def give_up(self, why: str) -> None:
        """Say that this member has given up an operation; returns when that is out.

        Args:
            why: In words; empty after a mismatch, as the others then read what this member called.
        """
        if why:
            self._testimony.publish(Call(text=why), self.arrivals.phase)
        self._own[GAVE_UP] = 1
        self.arrivals.order()

    def gave_up(self) -> list[int]:
        """Return the other members that said so."""
        return [member.rank for words, member in self._peers if words[GAVE_UP]]

    def why(self, rank: int) -> str:
        """Return why a member has given up an operation, in its words."""
        described = next(words[DESCRIBED] for words, member in self._peers if member.rank == rank)
        return self._testimony.text(rank, described & 0xFFFF).text

    def is_complete(self) -> bool:
        """Whether all have come to the last fence, with the same operation: some may have passed it."""
        at = self.arrivals.phase % RING
        return all(words[at] == self._own[at] for words, _ in self._peers)

    def behind(self, phase: int) -> list[int]:
        """Return the members that live and have not come to a fence: the last one, or the next."""
        return [
            member.rank
            for words, member in self._peers
            if words[phase % RING] >> PRINT_BITS != phase % PHASES and not _is_dead(member.neighbour)
        ]

    def control_page(self, rank: int) -> memoryview:
        """Return a member's control words; only its owner writes them."""
        region = self._regions[rank]
        return region.mapping.view[region.offset : region.offset + CONTROL_BYTES]

    def page_address(self, rank: int) -> int:
        """Return where a member's control words begin in this process."""
        return self._regions[rank].address

    def slot_address(self, rank: int, turn: int) -> int:
        """Return where a member's slot half begins in this process; `meet` first."""
        return self._regions[rank].address + PIECES_END + turn * self.slot_size

    def slot_bytes(self, rank: int, turn: int) -> memoryview:
        """Return a member's slot half."""
        return self.region_bytes(rank, PIECES_END + turn * self.slot_size, self.slot_size)

    def region_bytes(self, rank: int, start: int, nbytes: int) -> memoryview:
        """Return a part of a member's region: of a piece, say."""
        region = self._regions[rank]
        return region.mapping.view[region.offset + start : region.offset + start + nbytes]

    # Fences

    def fence(self, operation: Operation, whom: int = ALL) -> None:
        """Come to the next fence; return when those that are waited for are here, having called the same.

        What they wrote before is visible to this member after.

        Args:
            operation: What this member calls.
            whom: All, or one other member, or `NOBODY`.

        Raises:
            MismatchError: A member is here with another operation.
            OperationTimeoutError: The deadline passed; `missing` names who did not come.
            PeerLostError: A member died or left.
            GroupAbortedError: `abort` was called.
        """
        self.arrivals.cross(operation, self.wait, whom, self._turn_of_companion(operation))

    def reach(self, operation: Operation, phase: int) -> None:
        """Return when all members are at a fence that this one has come to before; raises as `fence`."""
        if self._peers:
            self.arrivals.reach(operation, self.wait, phase)

    def claim(self, operation: Operation, kind: int) -> None:
        """Leave word of the call, and claim the next piece of a kind.

        Raises:
            Dist2Error: As `fence`: others may have to be done with it.
        """
        self.inscribe(operation)
        self.arrivals.claim(operation, self.wait, kind)

    def inscribe(self, operation: Operation) -> None:
        """Leave word of what this member calls at the next fence, as it may be gone when somebody asks."""
        self._testimony.inscribe(operation, self.arrivals)

    def wait(self, operation: Operation) -> None:
        """Sleep until those that the arrivals seek have come to a fence; raises as `fence`."""
        whom, phase = self.arrivals.whom, self.arrivals.sought
        if whom == NOBODY:
            self._look(operation)
            return
        self._sleep_until(lambda: self._have_come(whom, phase), operation, lambda: self._absent(whom, phase))

    def _look(self, operation: Operation) -> None:
        """Raise if the group has failed, as far as can be known without waiting."""
        if self.messages is not None:
            self._attend(self.messages, operation)
        self._compare()
        troubled = any(words[STATE] for words, _ in self._peers)
        if self._abort is not None or troubled or self._lives.poll(0):
            self._check_members(lambda: self._absent(ALL, self.arrivals.phase), operation)

    def _turn_of_companion(self, operation: Operation) -> Callable[[], None] | None:
        """Return what gives the companion its turn, if there is one."""
        companion = self.companion
        return None if companion is None else lambda: self._attend(companion, operation)

    def note(self, operation: Operation, value: int) -> None:
        """Tell the other members a number with the next fence; raises as `fence`."""
        self.prepare(operation)
        self._own[NOTES + (self.arrivals.phase + 1 & 1)] = value

    def prepare(self, operation: Operation) -> None:
        """Return when this member may write what others read behind the next fence; raises as `fence`.

        There is such memory for every other fence: what is in it was for one before the last at the latest,
        and was read by all who have come to the last.
        """
        self.reach(operation, self.arrivals.phase)

    def noted(self) -> list[int]:
        """Return what the other members noted for the last fence; read before the next one."""
        return [words[NOTES + (self.arrivals.phase & 1)] for words, _ in self._peers]

    def _have_come(self, whom: int, phase: int) -> bool:
        """Whether some have come to a fence; raises if anybody called something else there or before."""
        self._compare()
        return not self._absent(whom, phase)

    def _compare(self) -> None:
        """Raise if a member has called something else at one of the last fences.

        Words of older ones are equal, or this member would not have come here.
        """
        phase = self.arrivals.phase
        for number in range(max(1, phase - WINDOW), phase + 1):
            at = number % RING
            word = self._own[at]
            for words, _ in self._peers:
                seen = words[at]
                if seen != word and seen >> PRINT_BITS == number % PHASES and seen:
                    raise self._mismatch(number, word)

    def _absent(self, whom: int, phase: int) -> list[int]:
        """Return those that are waited for and have not come to a fence with the same operation."""
        at = phase % RING
        return [
            member.rank
            for words, member in self._peers
            if whom in (ALL, member.rank) and words[at] != self._own[at]
        ]

    # Waiting

    def _sleep_until(
        self,
        arrived: Callable[[], bool],
        operation: Operation,
        missing: Callable[[], list[int]],
        patience_ns: int = 0,
    ) -> None:
        """Yield for a while, then sleep on the doorbell, until something is the case."""
        start = monotonic_ns()
        while not self.arrivals.sleepy and monotonic_ns() - start < patience_ns:
            if arrived():
                return
            yield_core()
        while not arrived():
            if ctrl_c.pending:
                ctrl_c.look()
            if self.messages is not None:
                self._attend(self.messages, operation)
            self._check_alive(operation, missing)
            self._sleep(arrived, operation)

    def _attend(self, messages: Companion, operation: Operation) -> None:
        """Give messages their turn."""
        try:
            messages.attend()
        except MismatchError:  # those who find out at the fence ask this member what it called
            self._testimony.publish(operation.call(), self.arrivals.phase)
            raise

    def _sleep(self, arrived: Callable[[], bool], operation: Operation) -> None:
        arrivals = self.arrivals
        arrivals.naps += 1
        self._own[SLEEPING] = sleeping_word(arrivals.naps, arrivals.whom, arrivals.sought)
        arrivals.order()  # the flag must be out before the peers' words are read again
        try:
            if arrived():
                return
            left_ms = (operation.deadline_ns - monotonic_ns()) / 1e6
            poll = select.poll()
            poll.register(self._host.doorbell.fileno(), select.POLLIN)
            if self.messages is not None:
                poll.register(self.messages.fileno(), select.POLLIN)
            for _, member in self._peers:
                if member.neighbour.fileno() >= 0:
                    poll.register(member.neighbour.fileno(), select.POLLIN)
            poll.poll(max(0.0, min(_SLEEP_MS, left_ms)))
            self._host.doorbell.silence()
        finally:
            self._own[SLEEPING] = 0

    def check(self, operation: Operation, rank: int) -> None:
        """Raise what a fence that waits for a member would: it died, left or aborted; or return."""
        self._check_alive(operation, lambda: [rank])

    def _check_alive(self, operation: Operation, missing: Callable[[], list[int]]) -> None:
        """Raise if the group was aborted here, a member is gone, or time is up."""
        absent = self._check_members(missing, operation)
        if monotonic_ns() >= operation.deadline_ns:
            raise absence(absent, {rank: self.last_seen(rank) for rank in absent})

    def _check_members(self, missing: Callable[[], list[int]], operation: Operation) -> list[int]:
        """Raise if the group was aborted here or a member is gone; return who is absent."""
        if self._abort is not None:
            raise self._abort
        absent = missing()
        states = {member.rank: words[STATE] for words, member in self._peers}
        revoked = [state >> _STATE_BITS for state in states.values() if state & _STATE_MASK == _REVOKED]
        if revoked:
            self._hear_out()
            raise GroupRevokedError(f"the group was revoked by rank {revoked[0]}", by=revoked[0])
        died = self.lost()
        if died:
            raise self._lost(died, operation, "died")
        left = [rank for rank in absent if states.get(rank) == _CLOSED]
        if any(states.get(rank, _OPEN) != _OPEN for rank in absent):
            self._hear_out()
        if left:
            raise self._lost(left, operation, "left the group")
        broke = [rank for rank in absent if states.get(rank) == _ABORTED]
        if broke:
            why = "" if self.messages is None else self.messages.why(broke)
            raise self._lost(broke, operation, f"aborted the group{why}")
        return absent

    def _hear_out(self) -> None:
        """Take in what a member said before it left: why it did may be in its messages."""
        end = time.monotonic() + _HEAR_S
        while self.messages is not None and time.monotonic() < end:
            self.messages.attend()
            time.sleep(_HEAR_S / 20)

    def last_seen(self, rank: int) -> str:
        """Return the operation that another member was last seen at, in words."""
        seq = next((words[SEQ] for words, member in self._peers if member.rank == rank), 0)
        if seq == 0:
            return "nothing in this group"
        known = {each.seq: each for each in (self.arrivals.before, self.arrivals.at) if each is not None}
        if seq in known:
            return known[seq].describe()
        call = self._testimony.of_operation(seq)
        return f"operation #{seq}" if call is None else call.text

    def lost(self) -> list[int]:
        """Return the group ranks that are known to have died."""
        states = {member.rank: words[STATE] for words, member in self._peers}
        return [
            member.rank
            for member in self.members
            if states.get(member.rank, _OPEN) == _OPEN and _is_dead(member.neighbour)
        ]

    def _lost(self, ranks: list[int], operation: Operation, how: str) -> PeerLostError:
        names = ", ".join(map(str, ranks))
        return PeerLostError(
            f"{operation.describe()} in group {operation.signature.group.name!r}: rank(s) {names} {how}",
            ranks=ranks,
        )

    # Mismatches

    def _mismatch(self, phase: int, word: int) -> MismatchError:
        """Exchange descriptions with all members, who see the mismatch as well, and name who called what."""
        mine = self._called(phase)
        self._testimony.publish(mine, phase)
        calls: dict[int, Call] = {}
        deadline = time.monotonic() + _EXPLAIN_S
        while len(calls) < len(self._peers) and time.monotonic() < deadline:
            for words, member in self._peers:
                call = None if member.rank in calls else self._testimony.at_fence(words, member.rank, phase)
                if call is not None:
                    calls[member.rank] = call
            yield_core()
        at = phase % RING
        differ = {member.rank for words, member in self._peers if words[at] != word}
        for rank in differ - calls.keys():
            calls[rank] = Call(text="an operation that it did not describe in time")
        return mismatch(self.rank, mine, calls, {rank: calls[rank].text for rank in differ})

    def _called(self, phase: int) -> Call:
        """Return what this member called at one of the last fences."""
        left = self._testimony.left_at(self._own, self.rank, phase)
        if left is not None:
            return left
        assert self.arrivals.at is not None  # it leaves word of calls in which it does not wait for all
        return self.arrivals.at.call()

    def departed(self) -> list[int]:
        """Return the members met before that have closed or aborted the group."""
        return [member.rank for words, member in self._peers if words[STATE] in (_CLOSED, _ABORTED)]

    # The end

    def abort(self, error: Dist2Error) -> None:
        """Make a blocked `fence` raise. Safe in signal handlers: sets a field and rings the own bell."""
        self._abort = error
        self.arrivals.stopped = True
        if self._own[STATE] & _STATE_MASK != _REVOKED:
            self._own[STATE] = _ABORTED
        with suppress(OSError):
            self._host.doorbell.ring()
        self._ring_all()

    def revoke(self, error: GroupRevokedError) -> None:
        """Make a blocked `fence` raise, here and on all other members."""
        self._abort = self._abort or error
        self.arrivals.stopped = True
        self._own[STATE] = _REVOKED | error.by << _STATE_BITS
        with suppress(OSError):
            self._host.doorbell.ring()
        self._ring_all()

    def close(self) -> None:
        """Leave: members that still wait for this one learn that it left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._own[STATE] == _OPEN:
            self._own[STATE] = _CLOSED
        self._abort = self._abort or GroupAbortedError("the group was closed")
        self.arrivals.stopped = True
        self._ring_all()
        self._host.leave(self._context, self._region, self._unused)

    def _unused(self) -> bool:
        """Whether nobody reads this region any more: peers may be inside an operation until they leave.

        Their own regions cannot tell, as those may be in other use by then; their directories can.
        """
        return all(
            _is_dead(member.neighbour) or member.neighbour.find(self._context, 0) is None
            for member in self.members
        )

    def _ring_all(self) -> None:
        for words, member in self._peers:
            if words[SLEEPING]:
                member.neighbour.doorbell.ring()


def _is_dead(neighbour: Neighbour) -> bool:
    if neighbour.fileno() < 0:
        return False
    poll = select.poll()  # select.select cannot take descriptors above 1023
    poll.register(neighbour.fileno(), select.POLLIN)
    return bool(poll.poll(0))
