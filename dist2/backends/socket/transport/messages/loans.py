# cython: annotation_typing=False
"""Loans: a long message inside a host, which its receiver reads from the sender's memory.

The sender's `OFFER` contains the address of the message, and the sender enters the loan in a slot of its
ring's header. The receiver lets the kernel copy it (`cross_memory`), one copy instead of two, and checks the
slot *afterwards*: a sender that withdraws its memory clears the slot first and does not wait. If the slot
still holds the loan, no byte was read after the memory had another use. If the kernel refuses, the receiver
answers with `ACCEPT`, as to any announced message, and gets the payload through the ring.
"""

from __future__ import annotations

import threading

from dist2.backends.socket.transport.cross_memory import read as read
from dist2.backends.socket.transport.links.ring import RingReader, RingWriter
from dist2.backends.socket.transport.raw import address_of
from dist2.backends.socket.wire import Loan
from dist2.runtime.built import check_built

check_built(__name__, __file__)

PIECE_BYTES = 1 << 20
"""Bytes read in one call: a thread that gives up a receive waits at most for one such read."""


class Lent:
    """The sender's side of a loan.

    Args:
        ring: The ring that has its slot.
        slot: Which.
    """

    def __init__(self, ring: RingWriter, slot: int) -> None:
        self._ring = ring
        self._slot = slot
        self._open = True

    @classmethod
    def enter(cls, ring: RingWriter, number: int) -> Lent | None:
        """Enter a loan; None if there are as many as there can be."""
        slot = ring.lend(number)
        return None if slot is None else cls(ring, slot)

    def loan(self, number: int, data: memoryview) -> Loan:
        """Return the description for the receiver."""
        return Loan(number, address_of(data), self._slot)

    def end(self) -> None:
        """Take the memory back. Idempotent."""
        if self._open:
            self._open = False
            self._ring.revoke(self._slot)


class Borrowed:
    """The receiver's side of a loan.

    Args:
        ring: The ring of the offer; knows the memory's process.
        loan: The offer.
        buffer: Where to.
        nbytes: How much.
    """

    def __init__(self, ring: RingReader, loan: Loan, buffer: int, nbytes: int) -> None:
        self.loan = loan
        self._ring = ring
        self._pid = ring.pid
        self._buffer = buffer
        self._missing = nbytes
        self._read = 0
        self._lock = threading.Lock()
        self._given_up = False

    @property
    def complete(self) -> bool:
        """Whether all of it was read."""
        return not self._missing

    @property
    def stands(self) -> bool:
        """Whether the bytes read so far are valid: the sender lives and has not withdrawn the loan."""
        return bool(self._ring.is_lent(self.loan.slot, self.loan.number))

    def read(self) -> None:
        """Read the next piece, unless it was given up.

        Raises:
            OSError: The kernel refuses, or the memory is gone.
        """
        with self._lock:
            if self._given_up:
                return
            count = min(self._missing, PIECE_BYTES)
            source = self.loan.address + self._read
            read(self._pid, self._buffer + self._read, source, count)
            self._read += count
            self._missing -= count

    def end(self) -> None:
        """End access to the buffer: wait until the current read is complete. Idempotent."""
        with self._lock:
            self._given_up = True
