"""Rings: byte pipes through shared memory, one writer and one reader, in place of a socket.

A ring lies in the writer's arena: a page with five words and the slots of loans (see ``loans.py``), then
the bytes. `head` counts bytes written, `tail` bytes read; each has one writer, so neither needs a lock. A
reader without data, or a writer without room, sets its flag before it sleeps and checks once more; the other
side then wakes it through the link's socket.

Positions are counted from `base`. While nothing is unread, the writer may set it to its next position, so
that the next bytes are written at the beginning again: in memory that both sides have in their caches.

Each end keeps its own counter in private memory and accepts the other's only within bounds: shared memory
written by a peer is untrusted input.

Source: Lamport, "Proving the Correctness of Multiprocess Programs", 1977 (the two-counter queue).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dist2.backends.socket.transport.raw import address_of, move
from dist2.compiled import messages
from dist2.errors import WireError
from dist2.runtime.other_process import has_ended

RING_BYTES = 1 << 20
HEADER_BYTES = 4096
_HEAD, _TAIL, _READER_SLEEPS, _WRITER_SLEEPS = 0, 8, 16, 24  # a cache line apart, in words
_BASE = 1  # read together with the head
_SLOTS_AT = 32
SLOTS = HEADER_BYTES // 8 - _SLOTS_AT

Buffer = bytes | memoryview


class Ring(messages.End):
    """The state common to both ends.

    Args:
        memory: `HEADER_BYTES` of words, then a number of bytes that is a power of two.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._words = memory[:HEADER_BYTES].cast("Q")
        self._bytes = memory[HEADER_BYTES:]
        self._capacity = len(self._bytes)
        self._address = address_of(self._bytes)
        self._barrier = threading.Lock()

    def _fence(self) -> None:
        """Order the stores before against the loads after, which x86 alone does not."""
        with self._barrier:  # no signal handler comes between
            pass


class RingWriter(Ring):
    """The writing end; `sendmsg` is the method of a socket that `Link` uses."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._count = self._words[_HEAD]
        self._base = self._words[_BASE]
        self._free_slots = list(range(SLOTS))

    @property
    def room(self) -> int:
        """Bytes that fit.

        Raises:
            ConnectionError: The reader's counter is invalid: it was overwritten.
        """
        unread = self._count - self._words[_TAIL]
        if not 0 <= unread <= self._capacity:
            raise ConnectionError(f"the reader of a ring says that {unread} bytes are unread")
        return self._capacity - unread

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Write as much as there is room for.

        Raises:
            BlockingIOError: There is none.
            ConnectionError: See `room`.
        """
        capacity, head, room = self._capacity, self._count, self._make_room()
        base = self._base
        if not room:
            raise BlockingIOError
        for buffer in buffers:
            count = min(len(buffer), room)
            place = (head - base) % capacity
            first = min(count, capacity - place)
            self._bytes[place : place + first] = buffer[:first]
            if first < count:
                self._bytes[: count - first] = buffer[first:count]
            head += count
            room -= count
            if not room:
                break
        written = head - self._count
        self._publish(head)
        return written

    def push(self, header: bytes, address: int, nbytes: int) -> bool:
        """Write a header and a payload by its address, or nothing: False if there is no room for both.

        Raises:
            ConnectionError: See `room`.
        """
        count = len(header)
        if self._make_room() < count + nbytes:
            return False
        capacity, head, base = self._capacity, self._count, self._base
        place = (head - base) % capacity
        if place + count + nbytes <= capacity:
            self._bytes[place : place + count] = header
            if nbytes:
                move(self._address + place + count, address, nbytes)
        else:
            first = min(count, capacity - place)
            self._bytes[place : place + first] = header[:first]
            self._bytes[: count - first] = header[first:]
            place = (head + count - base) % capacity
            first = min(nbytes, capacity - place)
            move(self._address + place, address, first)
            move(self._address, address + first, nbytes - first)
        self._publish(head + count + nbytes)
        return True

    def _make_room(self) -> int:
        """Return how many bytes fit; if all do, they begin at the beginning.

        Raises:
            ConnectionError: See `room`.
        """
        room = self.room
        if room == self._capacity:
            self._words[_BASE] = self._base = self._count
        return room

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

    def _publish(self, head: int) -> None:
        self._words[_HEAD] = self._count = head
        self._fence()

    @property
    def reader_sleeps(self) -> bool:
        """Whether the reader wants to be woken."""
        return bool(self._words[_READER_SLEEPS])

    @property
    def has_room(self) -> bool:
        return bool(self._count - self._words[_TAIL] < self._capacity)

    def doze(self, sleeping: bool) -> None:
        """Set whether the writer sleeps until there is room."""
        self._words[_WRITER_SLEEPS] = sleeping
        self._fence()


class RingReader(Ring):
    """The reading end; `recv_into` is the method of a socket that `Link` uses.

    Args:
        memory: See `Ring`.
        pid: The writer's process, if this one may read its memory; 0 if not.
        pidfd: Readable once that process has ended; -1: it is this very one.
    """

    def __init__(self, memory: memoryview, pid: int = 0, pidfd: int = -1) -> None:
        super().__init__(memory)
        self._count = self._words[_TAIL]
        self.pid = pid
        self._pidfd = pidfd

    @property
    def unread(self) -> int:
        """Bytes that are there.

        Raises:
            WireError: The writer's counter cannot be right.
        """
        count: int = self._words[_HEAD] - self._count
        if not 0 <= count <= self._capacity:
            raise WireError(f"a ring of {self._capacity} bytes with {count} unread")
        return count

    def recv_into(self, buffer: memoryview) -> int:
        """Read available bytes, up to the length of ``buffer``.

        Raises:
            BlockingIOError: Nothing is.
            WireError: See `unread`.
        """
        capacity, tail = self._capacity, self._count
        count = min(self.unread, len(buffer))
        if not count:
            raise BlockingIOError
        place = (tail - self._words[_BASE]) % capacity
        first = min(count, capacity - place)
        buffer[:first] = self._bytes[place : place + first]
        if first < count:
            buffer[first:count] = self._bytes[: count - first]
        self._consume(count)
        return count

    def pull(self, header: bytes, address: int, nbytes: int) -> bool:
        """Read a header equal to ``header``, and its payload to an address.

        False, with nothing read, if something else is next or not all of it is there.

        Raises:
            WireError: See `unread`.
        """
        count = len(header)
        if self.unread < count + nbytes:
            return False
        capacity, begin = self._capacity, self._count - self._words[_BASE]
        place = begin % capacity
        if place + count + nbytes <= capacity:
            if self._bytes[place : place + count].tobytes() != header:
                return False
            if nbytes:
                move(address, self._address + place + count, nbytes)
        else:
            first = min(count, capacity - place)
            if bytes(self._bytes[place : place + first]) + bytes(self._bytes[: count - first]) != header:
                return False
            place = (begin + count) % capacity
            first = min(nbytes, capacity - place)
            move(address, self._address + place, first)
            move(address + first, self._address, nbytes - first)
        self._consume(count + nbytes)
        return True

    def is_lent(self, slot: int, number: int) -> bool:
        """Whether a loan stands.

        That of a process that has ended does not: its number may be another process's by now, whose memory
        was read.
        """
        return slot < SLOTS and bool(self._words[_SLOTS_AT + slot] == number) and not has_ended(self._pidfd)

    def _consume(self, count: int) -> None:
        self._count += count
        self._words[_TAIL] = self._count
        self._fence()

    def look(self, times: int) -> bool:
        """Look up to so many times whether something is there."""
        words, tail = self._words, self._count
        for _ in range(times):  # noqa: SIM110 - `any` of a generator costs three times as much
            if words[_HEAD] != tail:
                return True
        return False

    @property
    def writer_sleeps(self) -> bool:
        """Whether the writer wants to be woken."""
        return bool(self._words[_WRITER_SLEEPS])

    @property
    def has_bytes(self) -> bool:
        return bool(self._words[_HEAD] != self._count)

    def doze(self, sleeping: bool) -> None:
        """Set whether the reader sleeps until data arrives."""
        self._words[_READER_SLEEPS] = sleeping
        self._fence()
