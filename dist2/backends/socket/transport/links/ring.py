"""The two ends of a ring, a byte pipe through shared memory in place of a socket; see ``messages/rings.c``.

Behind the words of the pipe, the first page of a ring has the slots of its writer's loans (``loans.py``).
"""

from __future__ import annotations

from dist2.compiled import messages
from dist2.runtime.other_process import has_ended

RING_BYTES = 1 << 20
HEADER_BYTES = 4096
_SLOTS_AT = 32
SLOTS = HEADER_BYTES // 8 - _SLOTS_AT


class RingWriter(messages.End):
    """The writing end; `sendmsg` is the method of a socket that `Link` uses.

    Args:
        memory: `HEADER_BYTES` of words, then a number of bytes that is a power of two.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory, writes=True)
        self._words = memory[:HEADER_BYTES].cast("Q")
        self._free_slots = list(range(SLOTS))

    def lend(self, number: int) -> int | None:
        """Enter a loan in a free slot and return which; None if there is none. ``number`` is not 0."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._words[_SLOTS_AT + slot] = number
        return slot

    def revoke(self, slot: int) -> None:
        """End a loan: later readers of its slot see that."""
        self._words[_SLOTS_AT + slot] = 0
        self._free_slots.append(slot)


class RingReader(messages.End):
    """The reading end; `recv_into` is the method of a socket that `Link` uses.

    Args:
        memory: See `RingWriter`.
        pid: The writer's process, if this one may read its memory; 0 if not.
        pidfd: Readable once that process has ended; -1: it is this very one.
    """

    def __init__(self, memory: memoryview, pid: int = 0, pidfd: int = -1) -> None:
        super().__init__(memory, writes=False)
        self._words = memory[:HEADER_BYTES].cast("Q")
        self.pid = pid
        self._pidfd = pidfd

    def is_lent(self, slot: int, number: int) -> bool:
        """Whether a loan stands.

        That of a process that has ended does not: its number may be another process's by now, whose memory
        was read.
        """
        return slot < SLOTS and bool(self._words[_SLOTS_AT + slot] == number) and not has_ended(self._pidfd)
