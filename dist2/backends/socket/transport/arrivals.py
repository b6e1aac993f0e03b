"""`Arrivals`: the words by which the members of a board come to its fences.

    arrivals = new_arrivals(own_words, doorbell, members, spins)
    arrivals.add(rank, words, their_doorbell)       # each other member
    if not arrivals.cross(operation):               # not all are here, after a while of looking
        ...                                         # sleep until they are

A member publishes a word made of the fence's number and the operation's fingerprint; all are here once every
other member's word is the same. There is a counterpart in C (`dist2.compiled.steps.Arrivals`) with the same
meaning, which takes the time of a few instructions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from dist2 import compiled
from dist2.backends.socket.transport.doorbell import Doorbell, PeerDoorbell
from dist2.backends.socket.transport.wakefulness import yield_core
from dist2.operation import Operation

WORDS = 9
"""Control words of a member. 0 and 1 are its arrivals, by parity."""
SLEEPING, STATE, DESCRIBED = 2, 3, 4
NOTES = 5
"""And 6, by parity."""
SEQ = 7
"""Number of the operation under way, or the last one."""
GAVE_UP = 8
"""It has given up an operation in which it lent memory: see `recall`."""

PHASE_BITS, PRINT_BITS = 24, 40
PHASES = 1 << PHASE_BITS
PRINT_MASK = (1 << PRINT_BITS) - 1

_YIELD_BUDGET_NS = 2_000_000
_SLOW_YIELD_NS = 200_000
"""What a yield may take for each rank that the core is shared with: beyond that somebody else has it."""
_FEW_YIELDS, _MANY_YIELDS = 16, 1 << 30
"""How often a waiter in C yields before it sleeps, where ranks outnumber cores and elsewhere."""
_SHORT_NAP, _LONG_NAP = 8, 512
"""For how many fences a waiter goes to sleep at once after a yield was slow: longer each time it happens."""

Attend = Callable[[], object]


class AnyArrivals(Protocol):
    """The arrivals of a board, in Python or in C.

    Attributes:
        phase: Number of the fence that this member came to last.
        sleepy: For how many fences it goes to sleep at once.
        at: The operation that it came to a fence with last.
        before: The one before that.
        stopped: Whether waiting is over, whoever is absent; set from any thread.
        turn: Which half of the slots the next block uses: 0 or 1.
    """

    @property
    def phase(self) -> int: ...
    @property
    def sleepy(self) -> int: ...
    @property
    def at(self) -> Operation | None: ...
    @property
    def before(self) -> Operation | None: ...

    stopped: bool
    turn: int

    def add(self, rank: int, words: memoryview, doorbell: PeerDoorbell, /) -> None:
        """Add another member: its words, and what wakes it."""

    def cross(self, operation: Operation, attend: Attend | None = None, /) -> bool:
        """Come to the next fence, and wait for the others for some milliseconds at most.

        It looks, then it yields the core. In C it then sleeps for a moment, which takes a system call or two;
        in Python sleeping costs so much that the caller sees to it.

        Args:
            operation: What this member calls.
            attend: Has a turn between two yields.

        Returns:
            Whether all are here, with the same operation. If not, it is time to sleep until they are.
        """

    def order(self) -> None:
        """Have all members see what was written before what is read next: a full memory fence."""


class Arrivals:
    """In Python; see `AnyArrivals`.

    Args:
        own: This member's words.
        spins: How often it looks before it yields.
        slow_ns: A yield that takes longer tells that somebody else uses the core.
    """

    def __init__(self, own: memoryview, spins: int, slow_ns: int) -> None:
        self.phase = 0
        self.sleepy = 0
        self.at: Operation | None = None
        self.before: Operation | None = None
        self.stopped = False
        self.turn = 0
        self._own = own
        self._spins = spins
        self._slow_ns = slow_ns
        self._nap = _SHORT_NAP
        self._peers: list[tuple[memoryview, PeerDoorbell]] = []
        self._lock = threading.Lock()

    def add(self, rank: int, words: memoryview, doorbell: PeerDoorbell, /) -> None:
        self._peers.append((words, doorbell))

    def cross(self, operation: Operation, attend: Attend | None = None, /) -> bool:
        phase = self.phase + 1
        self.phase = phase
        parity = phase & 1
        word = (phase % PHASES) << PRINT_BITS | operation.signature.fingerprint & PRINT_MASK
        if operation is not self.at:
            self.before, self.at = self.at, operation
            self._own[SEQ] = operation.seq
        self._own[parity] = word
        # The word must be out before a peer's sleep flag is read.
        self._lock.acquire()
        self._lock.release()
        for words, _ in self._peers:
            if words[parity] != word:
                return self._await(parity, word, attend)
        # All are here. Whoever sleeps waits for all, so that only the last to come has to ring: of several
        # that come together at least one sees the words of all, as each published its own first.
        for words, doorbell in self._peers:
            if words[SLEEPING]:
                doorbell.ring()
        return True

    def order(self) -> None:
        # x86 does not promise the order of a store and a later load; taking a lock is a full memory fence.
        self._lock.acquire()
        self._lock.release()

    def _await(self, parity: int, word: int, attend: Attend | None) -> bool:
        """Wait for the members that are not here yet: look, then yield.

        It reads one absent member's word at a time and nothing else: with more ranks than cores, what a rank
        does between two yields is what all the others wait for.
        """
        absent = [words for words, _ in self._peers]
        for _ in range(self._spins + 1):
            while absent[-1][parity] == word:
                absent.pop()
                if not absent:
                    return True
        budget = 0 if self.sleepy else _YIELD_BUDGET_NS
        self.sleepy -= bool(self.sleepy)
        start = now = monotonic_ns()
        while now - start < budget:
            while absent[-1][parity] == word:
                absent.pop()
                if not absent:
                    self._nap -= self._nap > _SHORT_NAP
                    return True
            if self.stopped:
                return False
            if attend is not None:
                attend()
            yield_core()
            before, now = now, monotonic_ns()
            if now - before > self._slow_ns:
                self.sleepy = self._nap  # somebody else uses the core: do not compete by polling
                self._nap = min(2 * self._nap, _LONG_NAP)
                break
        return False


def new_arrivals(own: memoryview, doorbell: Doorbell, members: int, spins: int) -> AnyArrivals:
    """Return the arrivals of a board, in C where dist2 was built with it.

    Args:
        own: The words of this member.
        doorbell: Of this process.
        members: How many members the board has, this one included.
        spins: How often this one looks before it yields.
    """
    cores = len(os.sched_getaffinity(0))
    slow_ns = _SLOW_YIELD_NS * -(-members // cores)
    if compiled.steps is None:
        return Arrivals(own, spins, slow_ns)
    yields = _FEW_YIELDS if members > cores else _MANY_YIELDS
    arrivals: AnyArrivals = compiled.steps.Arrivals(own, doorbell, spins, yields, slow_ns)
    return arrivals


def default_spins(ranks_here: int, pids: set[int], spin_us: float | None) -> int:
    """Return how often a waiter looks before it yields: not at all where ranks outnumber cores.

    Ranks that are threads of one process share its interpreter lock: looking would keep them off it.
    """
    if os.getpid() in pids or ranks_here > len(os.sched_getaffinity(0)):
        return 0
    return int((10.0 if spin_us is None else spin_us) * 1000 / _LOOK_NS)


_LOOK_NS = 40
