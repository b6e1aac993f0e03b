"""`Exposed`: maps the memory that the members of a board expose to each other (see `shared_empty`).

Before a fence each member writes a table into its control page: the file that its tensors lie in, and their
addresses in its own process. After the fence all read the tables of all, and so all decide alike whether
every member can map all memory. The core writes and reads the tables (``dist2/core/executor.c``: OFFER and
TAKE); this class maps a file when the core meets it first.
"""

from __future__ import annotations

import os
import struct

from dist2.backends.shared_tensors import locator_in
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import HEADER_WORDS, TABLE_AT, TABLE_BYTES
from dist2.backends.socket.transport.boards.roster import Member
from dist2.runtime.shared_memory import Mapping, attach

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
