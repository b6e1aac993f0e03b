"""The control words of a member: their positions in its page, and how they are written.

Only its owner writes a page; all members of the board read it. The one table of the words is in the core
(``dist2/core/layout.h``), with what each is for.
"""

from __future__ import annotations

from dist2.operation.engine import CONSTANTS
from dist2.operation.engine import WORDS_OF_CONTROL as _TABLE

RING: int = _TABLE["RING"]
ENTRY: int = _TABLE["ENTRY"]
WINDOW: int = _TABLE["WINDOW"]
SLEEPING: int = _TABLE["SLEEPING"]
STATE: int = _TABLE["STATE"]
DESCRIBED: int = _TABLE["DESCRIBED"]
GAVE_UP: int = _TABLE["GAVE_UP"]
MET: int = _TABLE["MET"]
SEQ: int = _TABLE["SEQ"]
WORDS: int = _TABLE["WORDS"]
TABLE_AT: int = _TABLE["TABLE_AT"]
TABLE_BYTES: int = _TABLE["TABLE_BYTES"]
HEADER_WORDS: int = _TABLE["HEADER_WORDS"]
IS_MAPPED: int = _TABLE["IS_MAPPED"]

ALL: int = CONSTANTS["ALL"]
NOBODY: int = CONSTANTS["NOBODY"]
"""The awaited members of a fence, if not one rank."""

PHASE_BITS: int = _TABLE["PHASE_BITS"]
PRINT_BITS: int = _TABLE["PRINT_BITS"]
PHASES = 1 << PHASE_BITS


def entry_at(phase: int) -> int:
    """Return the position of the entry of a fence: its word, and behind it the published number."""
    return phase % RING * ENTRY
