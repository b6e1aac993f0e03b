"""The control words of a member: their positions in its page, and how they are written.

Only its owner writes a page; all members of the board read it. The part in C has the same words, in
``dist2/compiled/source/steps/steps.h`` and ``fences.c``.
"""

from __future__ import annotations

RING = 32
"""Arrivals of a member that can be read: its first words, by number of the fence."""
WINDOW = RING // 2
"""A member is less than so many fences ahead of any other, and has compared all words that are so much older
than its last. A word is overwritten `RING` fences later: so those that it has not compared still stand."""
SLEEPING = 32
"""The awaited fence: a `sleeping_word`, or 0 while it is awake."""
STATE = 40
"""Not 0: it has closed, aborted or revoked the group. See `roster`."""
DESCRIBED = 41
"""At which fence it found a mismatch, and how long the description of its call is. See `mismatches`."""
GAVE_UP = 42
"""It has given up an operation in which it lent memory: see `recall`."""
NOTES = 43
"""A number that it publishes with a fence, here and in the next word, by the parity of the fence."""
MET = 45
"""It has found the regions of all members."""
CORE = 46
"""The core on which it waits, plus 1; 0 if unknown. Only in C."""
CROWDED = 47
"""Not 0: it has noticed that another process uses its core as well. Only in C."""
CALLED = 48
"""Its calls at those fences of the ring at which it did not wait for all: see `call_log`."""
SEQ = CALLED + RING
"""Number of the running operation, or the last one. It changes with every operation, so it is not in a cache
line that others read at each fence: readers have to fetch a written line again."""
RANG = SEQ + 1
"""When it last rang a doorbell: monotonic nanoseconds; only in C."""
RAN = RANG + 1
"""When it was known to run last, in the same way: it got its core back, or was at a fence. In C alone."""
PROBE = SEQ + 8
"""Written now and then, alone in a cache line: the time to read it shows the distance to its owner's caches.
Only in C."""
WORDS = PROBE + 1
"""Control words of a member."""

ALL, NOBODY = -1, -2
"""The awaited members of a fence, if not one rank."""

PHASE_BITS, PRINT_BITS = 24, 40
PHASES = 1 << PHASE_BITS
PRINT_MASK = (1 << PRINT_BITS) - 1

_WHOM_BITS = 16
_WHOM_MASK = (1 << _WHOM_BITS) - 1
_FOR_ALL, _FOR_ONE = 1, 2
_WORD_MASK = (1 << 64) - 1


def arrival_word(phase: int, fingerprint: int) -> int:
    """Return the word in a member's ring after its arrival at a fence.

    Args:
        phase: The number of the fence.
        fingerprint: The operation's fingerprint.
    """
    return (phase % PHASES) << PRINT_BITS | fingerprint & PRINT_MASK


def sleeping_word(nap: int, whom: int, phase: int) -> int:
    """Return the value of `SLEEPING` of a sleeping member.

    Args:
        nap: Different for each sleep: no member rings twice for one.
        whom: The awaited members: a rank or `ALL`.
        phase: Until they have come to this fence.
    """
    code = _FOR_ONE + whom if whom >= 0 else _FOR_ALL
    return (nap << (_WHOM_BITS + PHASE_BITS) | (phase % PHASES) << _WHOM_BITS | code) & _WORD_MASK


def read_sleeping_word(word: int) -> tuple[int, int]:
    """Return the rank that a sleeping member waits for, or `ALL`, and the fence's number modulo `PHASES`."""
    code = word & _WHOM_MASK
    return ALL if code == _FOR_ALL else code - _FOR_ONE, (word >> _WHOM_BITS) % PHASES
