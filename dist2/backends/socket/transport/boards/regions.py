"""`Regions`: the shared memory that the members of a board write, and its layout.

A member's region begins with a page of control words and texts, then come `Pieces`, two slot halves, and the
log of its calls (`call_log`). Only its owner writes a control page; all regions have the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.transport.boards.call_log import CALL_LOG_BYTES
from dist2.backends.socket.transport.boards.control_words import WORDS
from dist2.backends.socket.transport.boards.pieces import CONTROL_BYTES, PIECES_END
from dist2.backends.socket.transport.shared_memory import Neighbour, Region, SharedHost

TEXT_AT, TEXT_BYTES = 1024, 2048
"""Where in a member's control page a call is described: see `mismatches`. The tables of its exposed memory
follow: see `exposed`."""

SLOT_BYTES = 1 << 20
"""Each half of a member's slot. Larger operations go through in blocks."""


def slot_offset(turn: int, slot_size: int = SLOT_BYTES) -> int:
    """Return where in a region a slot half begins."""
    return PIECES_END + turn * slot_size


class Regions:
    """The known regions of one group: this member's from the start, the others' as they are found.

    Attributes:
        own: This member's.

    Args:
        host: The shared memory of this process.
        context: The group's context id.
        rank: This member's.
        slot_size: Bytes of a slot half; the same on all members.

    Raises:
        Dist2Error: Too many groups are open.
    """

    def __init__(self, host: SharedHost, context: int, rank: int, slot_size: int) -> None:
        self._host = host
        self._context = context
        self._call_log_at = slot_offset(2, slot_size)
        self._nbytes = self._call_log_at + CALL_LOG_BYTES
        self.own = host.join(context, self._nbytes, CONTROL_BYTES)
        self._known: dict[int, Region] = {rank: self.own}

    def is_there(self, neighbour: Neighbour) -> bool:
        """Whether the region of another member is there."""
        return neighbour.find(self._context) is not None

    def find(self, rank: int, neighbour: Neighbour) -> memoryview | None:
        """Return another member's control words if its region is there, which is known from now on."""
        offset = neighbour.find(self._context)
        if offset is None:
            return None
        region = self._known[rank] = neighbour.region(offset, self._nbytes)
        return region.mapping.words(region.offset, WORDS)

    def words(self, rank: int) -> memoryview:
        """Return a member's control words: see `arrivals`."""
        region = self._known[rank]
        return region.mapping.words(region.offset, WORDS)

    def control_page(self, rank: int) -> memoryview:
        """Return a member's control page, as bytes."""
        region = self._known[rank]
        return region.mapping.view[region.offset : region.offset + CONTROL_BYTES]

    def call_log(self, rank: int) -> memoryview:
        """Return a member's call log, as bytes."""
        return self.part(rank, self._call_log_at, CALL_LOG_BYTES)

    def part(self, rank: int, start: int, nbytes: int) -> memoryview:
        """Return a part of a member's region, such as a piece."""
        region = self._known[rank]
        return region.mapping.view[region.offset + start : region.offset + start + nbytes]

    def has_left(self, neighbour: Neighbour) -> bool:
        """Whether a member whose region is not there has left the group, and not only not joined it yet."""
        return neighbour.has_closed(self._context) or neighbour.has_departed()

    def has_aborted(self, neighbour: Neighbour) -> bool:
        """Whether such a member has aborted it."""
        return neighbour.has_aborted(self._context)

    def leave(self, others: Sequence[Neighbour], met: bool, aborted: bool) -> None:
        """Free the own region once no member reads it any more.

        Args:
            others: The processes of the other members, which may be inside an operation until they leave.
            met: Whether all of them have found the region.
            aborted: Whether this member has aborted the group.
        """

        def unused() -> bool:
            # Their own regions cannot tell, as those may be in other use by then; their directories can.
            joined = [each for each in others if each.find(self._context) is not None]
            return all(each.is_dead() for each in joined)

        self._host.leave(self._context, self.own, unused, met, aborted)
