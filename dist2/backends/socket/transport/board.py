"""`Board`: where the members of a group on one host meet in shared memory.

Each member has a region: a page of control words, then two slot halves for data. A *fence* is the one
synchronisation there is: a member publishes a word made of the fence's number and the operation's
fingerprint, then waits until every other member's word is the same. One comparison tells that a peer
has arrived *and* that it called the same thing.

Two words, used in turn, make this safe without a second wait: a member can be at most one fence ahead,
as the fence after that needs this one's word. For the same reason slot halves are used in turn.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import Protocol

import attrs

from dist2.backends.socket.transport.explaining import absence, mismatch
from dist2.backends.socket.transport.shared_memory import Neighbour, Region, SharedHost
from dist2.backends.socket.transport.wakefulness import yield_core
from dist2.call import Call
from dist2.ctrl_c import ctrl_c
from dist2.errors import Dist2Error, GroupAbortedError, GroupRevokedError, MismatchError, PeerLostError
from dist2.operation import Operation

CONTROL_BYTES = 4096
SLOT_BYTES = 1 << 20
"""Each half of a member's slot. Larger operations go through in blocks."""

_WORDS = 9
_SLEEPING, _STATE, _DESCRIBED = 2, 3, 4  # words 0 and 1 are the arrivals, by parity
_NOTES = 5  # and 6, by parity
_SEQ = 7  # of the operation under way, or the last one
_GAVE_UP = 8  # an operation in which it lent memory: see `recall`
_TEXT_AT, _TEXT_BYTES = 512, 2048
LENDING_AT, LENDING_BYTES = _TEXT_AT + _TEXT_BYTES, CONTROL_BYTES - _TEXT_AT - _TEXT_BYTES
"""Where in a member's control page it says what it lends: see `lending`."""
_OPEN, _CLOSED, _ABORTED, _REVOKED = 0, 1, 2, 3
_STATE_BITS = 8  # above them, who revoked
_STATE_MASK = (1 << _STATE_BITS) - 1

_PHASE_BITS, _PRINT_BITS = 24, 40
_PHASES = 1 << _PHASE_BITS
_PRINT_MASK = (1 << _PRINT_BITS) - 1

_SLEEP_MS = 20
_YIELD_BUDGET_NS = 2_000_000
_MEETING_YIELD_NS = 200_000
_SLOW_YIELD_NS = 200_000
"""What a yield may take for each rank that the core is shared with: beyond that somebody else has it."""
_SHORT_NAP, _LONG_NAP = 8, 512
"""For how many fences a waiter goes to sleep at once after a yield was slow: longer each time it happens."""
_EXPLAIN_S = 0.3
_HEAR_S = 0.05


class Companion(Protocol):
    """What must go on while members of a host wait for each other."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has something to do."""

    def attend(self) -> None:
        """Do it, without waiting; raise if the group has failed."""


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
        turn: Which slot half the next block uses: 0 or 1.
        slot_size: Bytes of a slot half.
        companion: Has its turns while this member waits: the messages of a group on several hosts.
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
        self.turn = 0
        self.slot_size = slot_size
        self.companion: Companion | None = None
        self.messages: Companion | None = None
        self._region_bytes = CONTROL_BYTES + 2 * slot_size
        self._host = host
        self._context = context
        self.members = tuple(members)
        self._spins = spins
        self._phase = 0
        self._sleepy = 0
        self._nap = _SHORT_NAP
        self._slow_ns = _SLOW_YIELD_NS * -(-(1 + len(members)) // len(os.sched_getaffinity(0)))
        self._abort: Dist2Error | None = None
        self._closed = False
        self._fence = threading.Lock()
        self._region = host.join(context, self._region_bytes)
        self._own = self._words(self._region)
        self._regions: dict[int, Region] = {rank: self._region}
        self._peers: list[tuple[memoryview, Member]] = []
        self._found = not members
        self._at: Operation | None = None
        self._before: Operation | None = None
        for member in members:  # whoever came first sleeps until this region is there
            member.neighbour.doorbell.ring()

    @staticmethod
    def _words(region: Region) -> memoryview:
        return region.mapping.words(region.offset, _WORDS)

    # Meeting

    def meet(self, operation: Operation) -> None:
        """Find the regions of all members; returns at once when they are known.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError.
        """
        if self._found:
            return
        self._sleep_until(
            self._look_up,
            operation,
            lambda: [member.rank for member in self._unmet()],
            patience_ns=_MEETING_YIELD_NS,
        )
        self._found = True

    def _look_up(self) -> bool:
        for member in self._unmet():
            region = member.neighbour.find(self._context, self._region_bytes)
            if region is None:
                return False
            self._regions[member.rank] = region
            self._peers.append((self._words(region), member))
        return True

    def _unmet(self) -> list[Member]:
        return [member for member in self.members if member.rank not in self._regions]

    @property
    def phase(self) -> int:
        """Number of the fence that was passed last."""
        return self._phase

    def give_up(self) -> None:
        """Say that this member has given up an operation; returns when that is out."""
        self._own[_GAVE_UP] = 1
        self._fence.acquire()
        self._fence.release()

    def gave_up(self) -> list[int]:
        """Return the other members that said so."""
        return [member.rank for words, member in self._peers if words[_GAVE_UP]]

    def is_complete(self) -> bool:
        """Whether all have come to the last fence, with the same operation: some may have passed it."""
        phase, own = self._phase, self._own[self._phase & 1]
        return not self.behind(phase) and all(
            words[phase & 1] == own or words[1 - (phase & 1)] >> _PRINT_BITS == (phase + 1) % _PHASES
            for words, _ in self._peers
        )

    def behind(self, phase: int) -> list[int]:
        """Return the members that live and have not come to a fence: the last one, or the next."""
        number = phase % _PHASES
        return [
            member.rank
            for words, member in self._peers
            if not any((word >> _PRINT_BITS) - number in (0, 1, 1 - _PHASES) for word in words[:2].tolist())
            and not _is_dead(member.neighbour)
        ]

    def control_page(self, rank: int) -> memoryview:
        """Return a member's control words; only its owner writes them."""
        region = self._regions[rank]
        return region.mapping.view[region.offset : region.offset + CONTROL_BYTES]

    def slot_address(self, rank: int, turn: int) -> int:
        """Return where a member's slot half begins in this process; `meet` first."""
        return self._regions[rank].address + CONTROL_BYTES + turn * self.slot_size

    def slot_bytes(self, rank: int, turn: int) -> memoryview:
        """Return a member's slot half."""
        region = self._regions[rank]
        start = region.offset + CONTROL_BYTES + turn * self.slot_size
        return region.mapping.view[start : start + self.slot_size]

    # Fences

    def fence(self, operation: Operation) -> None:
        """Return when all members are here, having called the same operation.

        What each wrote before is visible to all after.

        Raises:
            MismatchError: A member is here with another operation.
            OperationTimeoutError: The deadline passed; `missing` names who did not come.
            PeerLostError: A member died or left.
            GroupAbortedError: `abort` was called.
        """
        phase = self._phase + 1
        self._phase = phase
        parity = phase & 1
        word = (phase % _PHASES) << _PRINT_BITS | operation.signature.fingerprint & _PRINT_MASK
        if operation is not self._at:
            self._before, self._at = self._at, operation
            self._own[_SEQ] = operation.seq
        self._own[parity] = word
        # A full memory fence: the word must be out before a peer's sleep flag is read, which x86 does
        # not promise for a store and a later load.
        self._fence.acquire()
        self._fence.release()
        for words, _ in self._peers:
            if words[parity] != word:
                self._await(parity, word, operation)
                return
        # All are here. Whoever sleeps waits for all, so that only the last to come has to ring: of several
        # that come together at least one sees the words of all, as each published its own first.
        for words, member in self._peers:
            if words[_SLEEPING]:
                member.neighbour.doorbell.ring()

    def note(self, value: int) -> None:
        """Tell the other members a number with the next fence."""
        self._own[_NOTES + ((self._phase + 1) & 1)] = value

    def noted(self) -> list[int]:
        """Return what the other members noted for the last fence; read before the next one."""
        return [words[_NOTES + (self._phase & 1)] for words, _ in self._peers]

    def _await(self, parity: int, word: int, operation: Operation) -> None:
        """Wait for the members that are not here yet: look, then yield, then sleep.

        Looking and yielding read one absent member's word at a time and nothing else: with more ranks than
        cores, what a rank does between two yields is what all the others wait for.
        """
        absent = [words for words, _ in self._peers]
        for _ in range(self._spins + 1):
            while absent[-1][parity] == word:
                absent.pop()
                if not absent:
                    return
        budget = 0 if self._sleepy else _YIELD_BUDGET_NS
        self._sleepy -= bool(self._sleepy)
        start = now = monotonic_ns()
        while now - start < budget:
            while absent[-1][parity] == word:
                absent.pop()
                if not absent:
                    self._nap -= self._nap > _SHORT_NAP
                    return
            if self._abort is not None:
                raise self._abort
            if self.companion is not None:
                self._attend(self.companion, operation)
            yield_core()
            before, now = now, monotonic_ns()
            if now - before > self._slow_ns:
                self._sleepy = self._nap  # somebody else uses the core: do not compete by polling
                self._nap = min(2 * self._nap, _LONG_NAP)
                break
        self._sleep_until(
            lambda: self._all_arrived(parity, word, operation),
            operation,
            lambda: self._absent(parity, word),
        )

    def _all_arrived(self, parity: int, word: int, operation: Operation) -> bool:
        """Whether all are here; raises if one is at this fence or past it with another fingerprint."""
        arrived = True
        for words, _ in self._peers:
            seen = words[parity]
            if seen != word:
                arrived = False
                if ((seen >> _PRINT_BITS) - (word >> _PRINT_BITS)) % _PHASES < _PHASES // 2 and seen:
                    raise self._mismatch(parity, word, operation)
        return arrived

    def _absent(self, parity: int, word: int) -> list[int]:
        return [member.rank for words, member in self._peers if words[parity] != word]

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
        while not self._sleepy and monotonic_ns() - start < patience_ns:
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
            self._describe(operation)
            raise

    def _sleep(self, arrived: Callable[[], bool], operation: Operation) -> None:
        self._own[_SLEEPING] = 1
        self._fence.acquire()  # the flag must be out before the peers' words are read again
        self._fence.release()
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
            self._own[_SLEEPING] = 0

    def check(self, operation: Operation, rank: int) -> None:
        """Raise what a fence that waits for a member would: it died, left or aborted; or return."""
        self._check_alive(operation, lambda: [rank])

    def _check_alive(self, operation: Operation, missing: Callable[[], list[int]]) -> None:
        """Raise if the group was aborted here, a member is gone, or time is up."""
        if self._abort is not None:
            raise self._abort
        absent = missing()
        states = {member.rank: words[_STATE] for words, member in self._peers}
        revoked = [state >> _STATE_BITS for state in states.values() if state & _STATE_MASK == _REVOKED]
        if revoked:
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
            raise self._lost(broke, operation, "aborted the group")
        if monotonic_ns() >= operation.deadline_ns:
            raise absence(absent, {rank: self.last_seen(rank) for rank in absent})

    def _hear_out(self) -> None:
        """Take in what a member said before it left: why it did may be in its messages."""
        end = time.monotonic() + _HEAR_S
        while self.messages is not None and time.monotonic() < end:
            self.messages.attend()
            time.sleep(_HEAR_S / 20)

    def last_seen(self, rank: int) -> str:
        """Return the operation that another member was last seen at, in words."""
        seq = next((words[_SEQ] for words, member in self._peers if member.rank == rank), 0)
        if seq == 0:
            return "nothing in this group"
        known = {each.seq: each for each in (self._before, self._at) if each is not None}
        return known[seq].describe() if seq in known else f"operation #{seq}"

    def lost(self) -> list[int]:
        """Return the group ranks that are known to have died."""
        states = {member.rank: words[_STATE] for words, member in self._peers}
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

    def _mismatch(self, parity: int, word: int, operation: Operation) -> MismatchError:
        """Exchange descriptions with all members, who see the mismatch as well, and name who called what."""
        mine = self._describe(operation)
        calls: dict[int, Call] = {}
        deadline = time.monotonic() + _EXPLAIN_S
        while len(calls) < len(self._peers) and time.monotonic() < deadline:
            for words, member in self._peers:
                described = words[_DESCRIBED]
                if described >> 16 == self._phase:
                    calls[member.rank] = self._call_of(member.rank, described & 0xFFFF)
            yield_core()
        differ = {member.rank for words, member in self._peers if words[parity] != word}
        for rank in differ - calls.keys():
            calls[rank] = Call(text="an operation that it did not describe in time")
        return mismatch(self.rank, mine, calls, {rank: calls[rank].text for rank in differ})

    def _describe(self, operation: Operation) -> Call:
        """Publish what this member called, for those who called something else."""
        mine = operation.call()
        text = mine.encode()
        start = self._region.offset + _TEXT_AT
        self._region.mapping.view[start : start + len(text)] = text
        self._own[_DESCRIBED] = self._phase << 16 | len(text)
        return mine

    def _call_of(self, rank: int, length: int) -> Call:
        region = self._regions[rank]
        start = region.offset + _TEXT_AT
        return Call.decode(bytes(region.mapping.view[start : start + min(length, _TEXT_BYTES)]))

    def departed(self) -> list[int]:
        """Return the members met before that have closed or aborted the group."""
        return [member.rank for words, member in self._peers if words[_STATE] in (_CLOSED, _ABORTED)]

    # The end

    def abort(self, error: Dist2Error) -> None:
        """Make a blocked `fence` raise. Safe in signal handlers: sets a field and rings the own bell."""
        self._abort = error
        if self._own[_STATE] & _STATE_MASK != _REVOKED:
            self._own[_STATE] = _ABORTED
        with suppress(OSError):
            self._host.doorbell.ring()
        self._ring_all()

    def revoke(self, error: GroupRevokedError) -> None:
        """Make a blocked `fence` raise, here and on all other members."""
        self._abort = self._abort or error
        self._own[_STATE] = _REVOKED | error.by << _STATE_BITS
        with suppress(OSError):
            self._host.doorbell.ring()
        self._ring_all()

    def close(self) -> None:
        """Leave: members that still wait for this one learn that it left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._own[_STATE] == _OPEN:
            self._own[_STATE] = _CLOSED
        self._abort = self._abort or GroupAbortedError("the group was closed")
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
            if words[_SLEEPING]:
                member.neighbour.doorbell.ring()


def _is_dead(neighbour: Neighbour) -> bool:
    if neighbour.fileno() < 0:
        return False
    poll = select.poll()  # select.select cannot take descriptors above 1023
    poll.register(neighbour.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def default_spins(ranks_here: int, pids: set[int], spin_us: float | None) -> int:
    """Return how often a waiter looks before it yields: not at all where ranks outnumber cores.

    Ranks that are threads of one process share its interpreter lock: looking would keep them off it.
    """
    if os.getpid() in pids or ranks_here > len(os.sched_getaffinity(0)):
        return 0
    return int((10.0 if spin_us is None else spin_us) * 1000 / _LOOK_NS)


_LOOK_NS = 40
