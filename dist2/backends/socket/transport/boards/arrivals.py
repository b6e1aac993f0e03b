"""`Arrivals`: the words by which the members of a board signal their arrival at its fences.

    arrivals = new_arrivals(rank, own_words, doorbell, members, spins, halves)
    arrivals.add(rank, words, their_doorbell)       # each other member
    arrivals.cross(operation, board)                # come to the next fence, and wait for all
    arrivals.cross(operation, board, NOBODY)        # come to it and go on

A member publishes a word made of the fence's number and the operation's fingerprint; a peer has come once
its word is the same. Words stand in a ring, so that those of the last fences can be read for a while: a
member that does not wait may be less than `WINDOW` fences ahead (`control_words`). The type binds the
core: ``dist2/core/fences.c`` and ``waiter.c``.
"""

from __future__ import annotations

import os

from dist2.backends.socket.transport.boards.control_words import WORDS
from dist2.backends.socket.transport.boards.pieces import PIECES
from dist2.backends.socket.transport.doorbell import Doorbell
from dist2.operation.engine import Arrivals, Bell

_SLOW_YIELD_NS = 200_000
"""Longest normal yield for each rank that shares the core: after a longer one another process has it."""
_FEW_YIELDS, _MANY_YIELDS = 16, 1 << 30
"""How often a waiter yields before it sleeps, where ranks outnumber cores and elsewhere."""
_MOST_BYTES = 1 << 40
"""Of a half of a slot that there is not: as many as any plan may assume."""
_ROWS = tuple((row.base, row.stride, row.count) for row in PIECES)
"""Where pieces lie, as C wants it."""


def new_arrivals(
    rank: int, own: memoryview, doorbell: Doorbell, members: int, spins: int, halves: tuple[int, int]
) -> Arrivals:
    """Return the arrivals of a board.

    Args:
        rank: This member's rank.
        own: Its words.
        doorbell: This process's doorbell.
        members: How many members the board has, this one included.
        spins: How often this one looks before it yields.
        halves: Offsets of the halves of a slot in a region.
    """
    cores = len(os.sched_getaffinity(0))
    slow_ns = _SLOW_YIELD_NS * -(-members // cores)
    yields = _FEW_YIELDS if members > cores else _MANY_YIELDS
    return Arrivals(rank, own, doorbell.bell, spins, yields, slow_ns, halves, _ROWS)


def lone_arrivals(rank: int) -> Arrivals:
    """Return the arrivals of a member without a board: its plans have no fences, and use no slots."""
    words = memoryview(bytearray(8 * WORDS)).cast("Q")
    return Arrivals(rank, words, Bell(-1), 0, 0, 0, (0, _MOST_BYTES), _ROWS)


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
