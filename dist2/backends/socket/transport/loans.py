"""Loans: a long message inside a host, read by its receiver out of the sender's own memory.

The sender says in an `OFFER` where the message lies, and enters the loan in a slot of its ring's header.
The receiver has the kernel copy it (`cross_memory`), one copy instead of two, and looks at the slot
*afterwards*: a sender that wants its memory back clears the slot first and waits for nobody. If the slot
still holds the loan, no byte was read after the memory was another's. Where the kernel refuses, the
receiver answers with `ACCEPT`, as to any announced message, and gets the payload through the ring.

A sender that polls writes a part of the message itself, if the receiver asks for it (`RingReader.open_desk`).
"""

from __future__ import annotations

import threading
from time import monotonic_ns

from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.raw import address_of
from dist2.backends.socket.transport.ring import RingReader, RingWriter
from dist2.wire import Loan

_TURN_NS = 500_000
"""How long a message is read that its sender writes a part of, before others have their turn."""
PIECE_BYTES = 4 << 20
"""Read at once: nobody who gives up a receive waits longer than that takes."""


class Lent:
    """A loan as its sender sees it.

    Args:
        ring: Whose slot it is in.
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
        """Return what the receiver is told."""
        return Loan(number, address_of(data), self._slot)

    def end(self) -> None:
        """Take the memory back. Idempotent."""
        if self._open:
            self._open = False
            self._ring.revoke(self._slot)


class Borrowed:
    """A loan as its receiver sees it.

    Args:
        ring: What it was offered through; knows whose memory it is.
        loan: What was offered.
        buffer: Where to.
        nbytes: How much.
    """

    def __init__(self, ring: RingReader, loan: Loan, buffer: int, nbytes: int) -> None:
        self.loan = loan
        self._ring = ring
        self._pid = ring.pid
        self._buffer = buffer
        self._nbytes = nbytes
        self._missing = nbytes
        self._read = 0
        self._lock = threading.Lock()
        self._given_up = False
        self._shared: bool | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it was read."""
        return not self._missing

    @property
    def stands(self) -> bool:
        """Whether what was read so far is what was sent: the sender has not taken it back."""
        return self._ring.is_lent(self.loan.slot, self.loan.number)

    def read(self) -> None:
        """Read the next piece, unless it was given up.

        Raises:
            OSError: The kernel refuses, or the memory is gone.
        """
        with self._lock:
            if self._given_up:
                return
            if self._shared is None:
                self._shared = self._ring.open_desk(self.loan.number, self._buffer, self._nbytes, self._pid)
            if not self._shared:
                self._read_on()
                return
            try:
                self._read_share()
            except BaseException:
                self._end_sharing()
                raise

    def _read_on(self) -> None:
        count = min(self._missing, PIECE_BYTES)
        self._copy(self._read, count)
        self._read += count
        self._missing -= count

    def _read_share(self) -> None:
        """Read blocks that the sender does not write; once it has written its own, all is here."""
        ring, end = self._ring, monotonic_ns() + _TURN_NS
        while (block := ring.claim()) is not None:
            self._copy(*block)
            if monotonic_ns() >= end:
                return
        ring.close_desk()
        settled = ring.settle()
        if settled:
            self._shared = False  # where the sender could not write, all of it is read
            self._missing = 0 if settled > 0 else self._nbytes

    def _copy(self, at: int, count: int) -> None:
        cross_memory.read(self._pid, self._buffer + at, self.loan.address + at, count)

    def _end_sharing(self) -> None:
        if self._shared:
            self._shared = False
            self._ring.close_desk()
            self._ring.recall()

    def end(self) -> None:
        """Touch the buffer no more: waits until a piece that is being read is there. Idempotent."""
        with self._lock:
            self._given_up = True
            self._end_sharing()
