"""The control words of a member: their positions in its page, and how they are written.

Only its owner writes a page; all members of the board read it. The one table of the words is in the core
(``dist2/core/layout.h``), with what each is for.
"""

from __future__ import annotations

from dist2.operation.engine import WORDS_OF_CONTROL as _TABLE

RING: int = _TABLE["RING"]
WINDOW: int = _TABLE["WINDOW"]
SLEEPING: int = _TABLE["SLEEPING"]
STATE: int = _TABLE["STATE"]
DESCRIBED: int = _TABLE["DESCRIBED"]
GAVE_UP: int = _TABLE["GAVE_UP"]
NOTES: int = _TABLE["NOTES"]
MET: int = _TABLE["MET"]
CALLED: int = _TABLE["CALLED"]
SEQ: int = _TABLE["SEQ"]
WORDS: int = _TABLE["WORDS"]
TABLE_AT: int = _TABLE["TABLE_AT"]
TABLE_BYTES: int = _TABLE["TABLE_BYTES"]
HEADER_WORDS: int = _TABLE["HEADER_WORDS"]
IS_MAPPED: int = _TABLE["IS_MAPPED"]

ALL, NOBODY = -1, -2
"""The awaited members of a fence, if not one rank."""

PHASE_BITS: int = _TABLE["PHASE_BITS"]
PRINT_BITS: int = _TABLE["PRINT_BITS"]
PHASES = 1 << PHASE_BITS
PRINT_MASK = (1 << PRINT_BITS) - 1

_WHOM_BITS: int = _TABLE["WHOM_BITS"]
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
