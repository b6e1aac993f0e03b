"""`Testimony`: what the members of a board say that they called, for those who called something else.

A member that finds a mismatch writes into its control page what it called at that fence. One that does not
wait for all at a fence has left word of its call before: see `inscriptions`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dist2.backends.socket.transport.arrivals import CALLED, DESCRIBED, PHASES, PRINT_BITS, RING, AnyArrivals
from dist2.backends.socket.transport.inscriptions import (
    INSCRIPTIONS_BYTES,
    Inscriptions,
    read_inscription,
    seq_in,
)
from dist2.backends.socket.transport.shared_memory import Region
from dist2.call import Call
from dist2.operation import Operation

TEXT_AT, TEXT_BYTES = 1024, 2048
"""Where in a member's control page a call is described."""

_LENGTH_BITS = 16


class Testimony:
    """Of all members, as one of them sees it.

    Args:
        rank: The caller's.
        own: Its control words.
        regions: Of the members that are known.
        inscriptions_at: Where in a region the inscriptions begin.
    """

    def __init__(
        self, rank: int, own: memoryview, regions: Mapping[int, Region], inscriptions_at: int
    ) -> None:
        self._rank = rank
        self._own = own
        self._regions = regions
        self._inscriptions_at = inscriptions_at
        self._inscriptions: Inscriptions | None = None

    def inscribe(self, operation: Operation, arrivals: AnyArrivals) -> None:
        """Have the next fence tell others where they can read of this call."""
        if self._inscriptions is None:
            self._inscriptions = Inscriptions(self._inscribed(self._rank))
        arrivals.called = self._inscriptions.word(operation)
        arrivals.texts = self._inscriptions.count

    def publish(self, call: Call, phase: int) -> None:
        """Say what this member called at a fence."""
        text = call.encode()
        self._memory(self._rank, TEXT_AT, len(text))[:] = text
        self._own[DESCRIBED] = phase << _LENGTH_BITS | len(text)

    def text(self, rank: int, length: int) -> Call:
        """Return what a member has published last."""
        return Call.decode(bytes(self._memory(rank, TEXT_AT, min(length, TEXT_BYTES))))

    def at_fence(self, words: memoryview, rank: int, phase: int) -> Call | None:
        """Return what a member says that it called at one of the last fences; None if it says nothing yet."""
        described = words[DESCRIBED]
        if described >> _LENGTH_BITS == phase:
            return self.text(rank, described & ((1 << _LENGTH_BITS) - 1))
        return self.left_at(words, rank, phase)

    def left_at(self, words: memoryview, rank: int, phase: int) -> Call | None:
        """Return the call that a member left word of at one of the last fences; None if it did not."""
        if words[phase % RING] >> PRINT_BITS != phase % PHASES:
            return None
        return read_inscription(self._inscribed(rank), words[CALLED + phase % RING])

    def of_operation(self, seq: int) -> Call | None:
        """Return one of the last calls that this member left word of, by its number."""
        for word in self._own[CALLED : CALLED + RING]:
            if word and seq_in(word) == seq:
                return read_inscription(self._inscribed(self._rank), word)
        return None

    def _inscribed(self, rank: int) -> memoryview:
        return self._memory(rank, self._inscriptions_at, INSCRIPTIONS_BYTES)

    def _memory(self, rank: int, start: int, nbytes: int) -> memoryview:
        region = self._regions[rank]
        return region.mapping.view[region.offset + start : region.offset + start + nbytes]
