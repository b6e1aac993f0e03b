"""Rings: byte pipes through shared memory, one writer and one reader, in place of a socket's.

A ring lies in the writer's arena: four words, then the bytes. `head` counts bytes written, `tail` bytes
read; each has one writer, so neither needs a lock. Who finds nothing to read, or no room, and means to
sleep sets its flag first and looks once more; the other side then wakes it through the link's socket.

Source: Lamport, "Proving the Correctness of Multiprocess Programs", 1977 (the two-counter queue).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

RING_BYTES = 1 << 20
HEADER_BYTES = 256
_HEAD, _TAIL, _READER_SLEEPS, _WRITER_SLEEPS = 0, 8, 16, 24  # a cache line apart, in words

Buffer = bytes | memoryview


class Ring:
    """What both ends have in common.

    Args:
        memory: `HEADER_BYTES` of words, then a number of bytes that is a power of two.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:HEADER_BYTES].cast("Q")
        self._bytes = memory[HEADER_BYTES:]
        self._capacity = len(self._bytes)
        self._barrier = threading.Lock()

    def _fence(self) -> None:
        """Order the stores before against the loads after, which x86 alone does not."""
        self._barrier.acquire()
        self._barrier.release()


class RingWriter(Ring):
    """The end that writes; `sendmsg` is what `Link` knows of a socket."""

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Write as much as there is room for.

        Raises:
            BlockingIOError: There is none.
        """
        words, capacity = self._words, self._capacity
        head = words[_HEAD]
        room = capacity - (head - words[_TAIL])
        if not room:
            raise BlockingIOError
        start = head
        for buffer in buffers:
            count = min(len(buffer), room)
            place = head % capacity
            first = min(count, capacity - place)
            self._bytes[place : place + first] = buffer[:first]
            if first < count:
                self._bytes[: count - first] = buffer[first:count]
            head += count
            room -= count
            if not room:
                break
        words[_HEAD] = head
        self._fence()
        return int(head - start)

    @property
    def reader_sleeps(self) -> bool:
        """Whether the reader wants to be woken."""
        return bool(self._words[_READER_SLEEPS])

    @property
    def has_room(self) -> bool:
        return bool(self._words[_HEAD] - self._words[_TAIL] < self._capacity)

    def doze(self, sleeping: bool) -> None:
        """Say whether the writer means to sleep until there is room."""
        self._words[_WRITER_SLEEPS] = sleeping
        self._fence()


class RingReader(Ring):
    """The end that reads; `recv_into` is what `Link` knows of a socket."""

    def recv_into(self, buffer: memoryview) -> int:
        """Read what is there, up to the length of ``buffer``.

        Raises:
            BlockingIOError: Nothing is.
        """
        words, capacity = self._words, self._capacity
        tail = words[_TAIL]
        count = min(words[_HEAD] - tail, len(buffer))
        if not count:
            raise BlockingIOError
        place = tail % capacity
        first = min(count, capacity - place)
        buffer[:first] = self._bytes[place : place + first]
        if first < count:
            buffer[first:count] = self._bytes[: count - first]
        words[_TAIL] = tail + count
        self._fence()
        return int(count)

    @property
    def writer_sleeps(self) -> bool:
        """Whether the writer wants to be woken."""
        return bool(self._words[_WRITER_SLEEPS])

    @property
    def has_bytes(self) -> bool:
        return bool(self._words[_HEAD] != self._words[_TAIL])

    def doze(self, sleeping: bool) -> None:
        """Say whether the reader means to sleep until something comes."""
        self._words[_READER_SLEEPS] = sleeping
        self._fence()
