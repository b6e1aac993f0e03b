"""Memory that the members of a board expose to each other (see `shared_empty`): mapped, and taken back.

Before a fence each member writes a table into its control page: the file that its tensors lie in, and their
addresses in its own process. After the fence all read the tables of all, and so all decide alike whether
every member can map all memory. The core writes and reads the tables (``dist2/core/executor.c``: OFFER and
TAKE); `Exposed` maps a file when the core meets it first.

A member that gives up an operation (a deadline has passed, a member died, the group was aborted) publishes
that in its page, and only then checks which members may be using its memory. A member that passes a fence of
an operation with exposed memory checks whether another one has given up. Each publishes before it checks, so
at least one of the two sees the other. A member that arrives later does not use that memory, and raises; the
owner waits for members that arrived earlier. Data read from a member is valid if that member has not given up
by the next fence.
"""

from __future__ import annotations

import os
import struct
import time

from dist2.backends.shared_tensors import locator_in
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import (
    GAVE_UP,
    HEADER_WORDS,
    PHASES,
    PRINT_BITS,
    TABLE_AT,
    TABLE_BYTES,
    entry_at,
)
from dist2.backends.socket.transport.boards.roster import Member
from dist2.backends.socket.transport.spinning import yield_core
from dist2.errors import MismatchError, PeerLostError
from dist2.operation.description import Call
from dist2.operation.record import Operation
from dist2.runtime.shared_memory import Mapping, attach

PATIENCE_S = 0.1
"""How long others are waited for: longer than a copy takes, but one of them may be stopped half way."""

HEAR_S = 0.25
"""How long a member looks for the reason after another one has given up."""

_HEADER = struct.Struct(f"<{HEADER_WORDS}Q")


class Exposed:
    """The exposed memory of one board.

    Args:
        board: Where the members meet.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._mapped: dict[tuple[int, int], Mapping] = {}

    def find(self, member: Member) -> None:
        """Have plans find the memory that a member exposes since the last fence.

        Raises:
            PeerLostError: The member is gone.
        """
        board = self._board
        at = TABLE_AT + (board.phase & 1) * TABLE_BYTES
        header = _HEADER.unpack_from(board.regions.control_page(member.rank), at)
        locator, count = locator_in(header, member.neighbour.pid), header[1]
        shift = 0
        if count and locator.pid != os.getpid():
            key = locator.pid, locator.fd
            mapping = self._mapped.get(key)
            if mapping is None:
                mapping = self._mapped[key] = attach(locator)
            shift = mapping.address - locator.address
        board.arrivals.know(member.rank, header, shift % (1 << 64))


class Recall:
    """Gives up operations of one board.

    Args:
        board: Where the members meet.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._own = board.regions.words(board.rank)
        self._peers = board.roster.peers

    def gave_up(self) -> list[int]:
        """Return the other members that have given up an operation."""
        return [member.rank for words, member in self._peers if words[GAVE_UP]]

    def check(self, operation: Operation) -> None:
        """Raise if a member has given up an operation in which it had exposed memory.

        Raises:
            PeerLostError, GroupRevokedError, GroupAbortedError: It died, left, or gave up.
        """
        gone = self.gave_up()
        if not gone:
            return
        self._hear(operation, gone[0])
        names = self._board.names
        why = names.alike({rank: self._board.mismatches.published(rank).text for rank in gone})
        raise PeerLostError(f"{names(gone)} gave up this operation ({why})", ranks=gone)

    def _hear(self, operation: Operation, rank: int) -> None:
        """Raise why a member exposes nothing any more; return if that cannot be found out in a while.

        That it died, left or aborted is the better answer, as is the death for which it gave up, on this host
        or another.
        """
        end = time.monotonic() + HEAR_S
        while True:
            self._board.check(operation, rank)
            if self._board.progress is not None:
                self._board.progress.attend()
            if time.monotonic() > end:
                return
            yield_core()

    def give_up(self, first: int, error: BaseException) -> None:
        """Withdraw the memory that this member exposed; return when no other member uses it any more.

        Args:
            first: Number of the operation's first fence: before it no member uses the exposed memory.
            error: Why, for the others to read.
        """
        phase = self._board.phase
        # After a mismatch the others read this member's call.
        self.announce("" if isinstance(error, MismatchError) else f"{type(error).__name__}: {error}")
        complete = self._is_complete()
        if phase < first or (phase == first and not complete):
            return  # no member has passed the first fence; one that does later sees the give-up
        done = phase + 1 if complete else phase
        end = time.monotonic() + PATIENCE_S
        while set(self._behind(done)).difference(self.gave_up()) and time.monotonic() < end:
            yield_core()

    def announce(self, why: str) -> None:
        """Publish that this member has given up an operation; return when it is sent.

        Args:
            why: The reason as text; empty to leave the text that it published before.
        """
        if why:
            self._board.mismatches.publish(Call(text=why), self._board.phase)
        self._own[GAVE_UP] = 1
        self._board.arrivals.order()

    def _is_complete(self) -> bool:
        """Whether all have come to the last fence, with the same operation: some may have passed it."""
        at = entry_at(self._board.phase)
        return all(words[at] == self._own[at] for words, _ in self._peers)

    def _behind(self, phase: int) -> list[int]:
        """Return the members that live and have not come to a fence: the last one, or the next."""
        return [
            member.rank
            for words, member in self._peers
            if words[entry_at(phase)] >> PRINT_BITS != phase % PHASES and not member.neighbour.is_dead()
        ]
