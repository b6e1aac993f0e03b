"""`Arrivals`: the words by which the members of a board signal their arrival at its fences.

    arrivals = new_arrivals(rank, own_words, doorbell, members, spins)
    arrivals.add(rank, words, their_doorbell)       # each other member
    arrivals.cross(operation, wait)                 # come to the next fence, and wait for all
    arrivals.cross(operation, wait, NOBODY)         # come to it and go on

A member publishes a word made of the fence's number and the operation's fingerprint; a peer has come once
its word is the same. Words stand in a ring, so that those of the last fences can be read for a while: a
member that does not wait may be up to `WINDOW` fences ahead. There is a counterpart in C
(`dist2.compiled.steps.Arrivals`) with the same meaning, which takes the time of a few instructions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from dist2 import compiled
from dist2.backends.socket.transport.boards.control_words import (
    ALL,
    CALLED,
    DESCRIBED,
    NOBODY,
    PHASES,
    PRINT_BITS,
    RING,
    SEQ,
    SLEEPING,
    STATE,
    WINDOW,
    arrival_word,
    read_sleeping_word,
)
from dist2.backends.socket.transport.boards.pieces import PIECES, Pieces
from dist2.backends.socket.transport.doorbell import Doorbell, PeerDoorbell
from dist2.backends.socket.transport.spinning import yield_core
from dist2.operation.signature import Operation

_LOOK_EVERY_NS = 5_000_000
"""How often a wait for fewer than all members checks the health of all."""

_YIELD_BUDGET_NS = 2_000_000
_SLOW_YIELD_NS = 200_000
"""Longest normal yield for each rank that shares the core: after a longer one another process has it."""
_LASTING_NS = 20_000_000
"""Two yields have to be slow within this time: one may be a thread of the system."""
_FEW_YIELDS, _MANY_YIELDS = 16, 1 << 30
"""How often a waiter in C yields before it sleeps, where ranks outnumber cores and elsewhere."""
_SHORT_NAP, _LONG_NAP = 8, 512
"""How many fences a waiter goes to sleep at once for, after a yield was slow: more each time it happens."""

_ROWS = tuple((row.base, row.stride, row.count) for row in PIECES)
"""Where pieces lie, as C wants it."""

Attend = Callable[[], object]
Wait = Callable[[Operation], object]


class AnyArrivals(Protocol):
    """The arrivals of a board, in Python or in C.

    Attributes:
        phase: Number of the fence that this member came to last.
        sought: The fence that `wait` has to wait for,
        whom: and the awaited members: a rank, `ALL`, or `NOBODY` to check the health of all.
        slot: Offset in the region of each member of the piece that was claimed last.
        sleepy: The number of further fences at which it sleeps at once.
        naps: The number of sleeps of this member.
        waited_ns: The time that it has waited for others, after the first look.
        called: Word of the operation, to be published with the next fence.
        texts: How many texts were written for such words: see `call_log`.
        at: The operation with which this member came to its last fence.
        before: The operation before that.
        stopped: Whether waiting is over, even if members are absent; set from any thread.
        turn: Which half of the slots the next block uses: 0 or 1.
        spreads: Whether this member migrates to another core if many wait on its own; only in C.
    """

    @property
    def phase(self) -> int: ...
    @property
    def sought(self) -> int: ...
    @property
    def whom(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def sleepy(self) -> int: ...
    @property
    def at(self) -> Operation | None: ...
    @property
    def before(self) -> Operation | None: ...
    @property
    def waited_ns(self) -> int: ...

    called: int
    texts: int
    naps: int
    stopped: bool
    turn: int
    spreads: bool

    def add(self, rank: int, words: memoryview, doorbell: PeerDoorbell, /) -> None:
        """Add another member: its words, and its doorbell."""

    def cross(
        self, operation: Operation, wait: Wait, whom: int = ALL, attend: Attend | None = None, /
    ) -> None:
        """Arrive at the next fence, and wait for all, for one other member, or for none.

        It polls, then it yields the core. In C it then sleeps for a moment, which takes a system call or two;
        in Python ``wait`` sleeps, because that costs more.

        Args:
            operation: The call of this member.
            wait: Sleeps until ``whom`` has come to fence ``sought``, or raises.
            whom: A rank, `ALL` or `NOBODY`.
            attend: Called between two yields.

        Raises:
            Dist2Error: Raised by ``wait``.
        """

    def reach(self, operation: Operation, wait: Wait, phase: int, /) -> None:
        """Wait until all have arrived at a fence that this member has reached before."""

    def claim(self, operation: Operation, wait: Wait, kind: int, /) -> None:
        """Claim the next piece of one kind, once no member uses its content; `slot` has its position."""

    def order(self) -> None:
        """Order earlier writes before later reads for all members: a full memory fence."""


class _Peer:
    """Another member.

    Attributes:
        rank: Its rank.
        words: Its control words.
        doorbell: Wakes it.
        agreed: It has come to all fences up to this one, with the same calls.
        rung: Its `SLEEPING` when its doorbell was rung last.
    """

    __slots__ = ("agreed", "doorbell", "rank", "rung", "words")

    def __init__(self, rank: int, words: memoryview, doorbell: PeerDoorbell) -> None:
        self.rank = rank
        self.words = words
        self.doorbell = doorbell
        self.agreed = 0
        self.rung = 0


class Arrivals:
    """The arrivals of one member at fences, in Python: see `AnyArrivals`.

    Args:
        rank: This member's.
        own: Its words.
        spins: How often it looks before it yields.
        slow_ns: A yield that takes longer shows that another process uses the core.
    """

    def __init__(self, rank: int, own: memoryview, spins: int, slow_ns: int) -> None:
        self.phase = 0
        self.sought = 0
        self.whom = ALL
        self.slot = 0
        self.sleepy = 0
        self.naps = 0
        self.waited_ns = 0
        self.called = 0
        self.texts = 0
        self.at: Operation | None = None
        self.before: Operation | None = None
        self.stopped = False
        self.turn = 0
        self.spreads = False
        self._rank = rank
        self._own = own
        self._spins = spins
        self._slow_ns = slow_ns
        self._nap = _SHORT_NAP
        self._wanted_ns = 0
        self._looked_ns = 0
        self._peers: list[_Peer] = []
        self._pieces = Pieces(PIECES)
        self._lock = threading.Lock()

    def add(self, rank: int, words: memoryview, doorbell: PeerDoorbell, /) -> None:
        self._peers.append(_Peer(rank, words, doorbell))

    def cross(
        self, operation: Operation, wait: Wait, whom: int = ALL, attend: Attend | None = None, /
    ) -> None:
        phase = self.phase + 1
        # This word overwrites an older one, which all must have read; and no member may be so far behind that
        # it would miss this member's earlier calls.
        if phase >= WINDOW:
            self._reach(operation, wait, phase - WINDOW + 1, WINDOW // 2)
        self.phase = phase
        if operation is not self.at:
            self.before, self.at = self.at, operation
            self._own[SEQ] = operation.seq
        own = self._own
        own[CALLED + phase % RING], self.called = self.called, 0
        own[phase % RING] = arrival_word(phase, operation.signature.fingerprint)
        # The word must be visible before a peer's sleep flag is read.
        with self._lock:
            pass
        self._ring_sleepers()
        if whom != ALL and self._is_troubled():
            self.whom, self.sought = NOBODY, phase
            wait(operation)
        self._wait_for(operation, wait, whom, phase, attend)

    def reach(self, operation: Operation, wait: Wait, phase: int, /) -> None:
        self._reach(operation, wait, phase, 0)

    def claim(self, operation: Operation, wait: Wait, kind: int, /) -> None:
        last = self._pieces.last_use(kind, self.phase)
        if last:
            self._reach(operation, wait, last + 1, self._pieces.count(kind) // 2)
        self.slot = self._pieces.claim(kind)

    def order(self) -> None:
        # x86 does not promise the order of a store and a later load; taking a lock is a full memory fence.
        with self._lock:
            pass

    def _has_come(self, peer: _Peer, phase: int) -> bool:
        """Whether a member has come to a fence, and called the same there and before."""
        while peer.agreed < phase:
            at = (peer.agreed + 1) % RING
            if peer.words[at] != self._own[at]:
                return False
            peer.agreed += 1
        return True

    def _ring_sleepers(self) -> None:
        """Wake the members that may go on, once for each of their naps.

        Of several that come together at least one sees the words of all, as each published its own first.
        """
        for peer in self._peers:
            sleeping = peer.words[SLEEPING]
            if sleeping and sleeping != peer.rung and self._frees(peer, sleeping):
                peer.rung = sleeping
                peer.doorbell.ring()

    def _frees(self, sleeper: _Peer, sleeping: int) -> bool:
        """Whether a member that sleeps may go on, as this one has come to its last fence."""
        whom, phase = read_sleeping_word(sleeping)
        if (self.phase - phase) % PHASES >= PHASES // 2:
            return False
        if whom != ALL:
            return whom == self._rank
        return all(_is_at(peer, phase) for peer in self._peers if peer is not sleeper)

    def _is_troubled(self) -> bool:
        """Whether a member made another call or reports a failure, or a check for deaths is due."""
        for peer in self._peers:
            if peer.words[STATE] or peer.words[DESCRIBED]:
                return True
            if self._has_come(peer, self.phase) or not _is_at(peer, peer.agreed + 1):
                continue
            if not self._has_come(peer, peer.agreed + 1):  # again: it may have come just now
                return True
        now = monotonic_ns()
        if now - self._looked_ns < _LOOK_EVERY_NS and not self.stopped:
            return False
        self._looked_ns = now
        return True

    def _reach(self, operation: Operation, wait: Wait, phase: int, more: int) -> None:
        """Wait until all have come to an earlier fence.

        If there is anything to wait for, then for some fences more, so that a switch of processes is paid
        once for several operations.
        """
        for peer in self._peers:
            if not self._has_come(peer, phase):
                self._wait_for(operation, wait, ALL, min(phase + more, self.phase), None)
                return

    def _wait_for(
        self, operation: Operation, wait: Wait, whom: int, phase: int, attend: Attend | None
    ) -> None:
        """Wait until some have come to a fence that this member has come to."""
        absent = [peer for peer in self._peers if whom in (ALL, peer.rank)]
        if self._have_come(absent, phase):
            return
        since_ns = monotonic_ns()
        try:
            if self._have_come(absent, phase, self._spins):
                return
            self.whom, self.sought = whom, phase
            if not self._yield_until(absent, phase, attend):
                wait(operation)
                self._have_come(absent, phase)  # note it
        finally:
            self.waited_ns += monotonic_ns() - since_ns

    def _have_come(self, absent: list[_Peer], phase: int, looks: int = 1) -> bool:
        """Whether the absent have come; removes those that have."""
        for _ in range(looks):
            while absent and self._has_come(absent[-1], phase):
                absent.pop()
            if not absent:
                return True
        return False

    def _yield_until(self, absent: list[_Peer], phase: int, attend: Attend | None) -> bool:
        """Yield until the absent have come, for some milliseconds at most.

        It reads one absent member's word at a time and nothing else: with more ranks than cores, all others
        wait for the work of a rank between two yields.
        """
        budget = 0 if self.sleepy else _YIELD_BUDGET_NS
        start = now = monotonic_ns()
        if self.sleepy:
            self.sleepy -= 1
            self._wanted_ns = now
        while now - start < budget:
            if self._have_come(absent, phase):
                self._nap -= self._nap > _SHORT_NAP
                return True
            if self.stopped:
                return False
            if attend is not None:
                attend()
            yield_core()
            before, now = now, monotonic_ns()
            if now - before > self._slow_ns and self._is_wanted(now):
                self.sleepy = self._nap  # another process uses the core: do not compete by polling
                self._nap = min(2 * self._nap, _LONG_NAP)
                break
        return False

    def _is_wanted(self, now_ns: int) -> bool:
        """Whether a slow yield shows that another process needs the core for longer; one alone does not."""
        lasting = now_ns - self._wanted_ns < _LASTING_NS
        self._wanted_ns = now_ns
        return lasting


def _is_at(peer: _Peer, phase: int) -> bool:
    """Whether a member's word of a fence is in its page, for any call."""
    return peer.words[phase % RING] >> PRINT_BITS == phase % PHASES


def new_arrivals(rank: int, own: memoryview, doorbell: Doorbell, members: int, spins: int) -> AnyArrivals:
    """Return the arrivals of a board, in C where dist2 was built with it.

    Args:
        rank: This member's rank.
        own: Its words.
        doorbell: This process's doorbell.
        members: How many members the board has, this one included.
        spins: How often this one looks before it yields.
    """
    cores = len(os.sched_getaffinity(0))
    slow_ns = _SLOW_YIELD_NS * -(-members // cores)
    if compiled.steps is None:
        return Arrivals(rank, own, spins, slow_ns)
    yields = _FEW_YIELDS if members > cores else _MANY_YIELDS
    arrivals: AnyArrivals = compiled.steps.Arrivals(rank, own, doorbell, spins, yields, slow_ns, *_ROWS)
    return arrivals


def default_spins(ranks_here: int, pids: set[int], spin_us: float | None) -> int:
    """Return how often a waiter looks before it yields: not at all where ranks outnumber cores.

    Ranks that are threads of one process share its interpreter lock: looking would keep them off it.
    """
    if os.getpid() in pids or ranks_here > len(os.sched_getaffinity(0)):
        return 0
    return int((10.0 if spin_us is None else spin_us) * 1000 / _LOOK_NS)


def lone_spins(pids: set[int], spin_us: float | None) -> int:
    """Return how often a waiter polls if ranks outnumber cores but no other thread needs its core."""
    return default_spins(0, pids, min(_LONE_US, _LONE_US if spin_us is None else spin_us))


_LOOK_NS = 40
_LONE_US = 4.0
