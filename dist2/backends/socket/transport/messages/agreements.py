"""`Agreements`: the agreements of one group, in order. The fabric's lock guards it."""

from __future__ import annotations

from dist2.backends.consensus import Consensus
from dist2.errors import WireError


class Agreements:
    """The current agreement, and the next one, which other members may have begun.

    There cannot be more: no agreement ends before every survivor has called for it.

    Attributes:
        number: Number of the current agreement, or of the next one; the first is 1.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.number = 1
        self.rank = rank
        self.world_size = world_size
        self._open: dict[int, Consensus] = {}

    def current(self) -> Consensus:
        """Return the current agreement; it stays current if a caller gives up waiting."""
        return self._of(self.number)

    def known(self, number: int) -> Consensus | None:
        """Return the agreement of an arrived control message; None if it has ended here.

        Raises:
            WireError: It cannot have begun.
        """
        if number > self.number + 1:
            raise WireError(f"agreement {number}, where {self.number} is under way")
        return self._of(number) if number >= self.number else None

    def under_way(self) -> list[tuple[int, Consensus]]:
        """Return the agreements that may still send letters, with their numbers."""
        return list(self._open.items())

    def finish(self) -> None:
        """End the current agreement: the next one has the next number."""
        self._open.pop(self.number, None)
        self.number += 1

    def _of(self, number: int) -> Consensus:
        return self._open.setdefault(number, Consensus(self.rank, self.world_size))
