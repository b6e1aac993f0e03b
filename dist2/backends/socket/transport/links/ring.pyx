# cython: language_level=3, binding=False, boundscheck=False, wraparound=False, embedsignature=False
# distutils: sources = dist2/core/far.c dist2/core/memory.c dist2/core/ring.c
# distutils: include_dirs = dist2/core
"""The two ends of a ring, a byte pipe through shared memory in place of a socket: see dist2/core/ring.h."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

RING_BYTES = 1 << 20
HEADER_BYTES = 8 * RING_PAGE_WORDS


@cython.no_gc  # it refers to nothing but memory, which it holds to its end
cdef class End:
    """One end of a ring, with the methods of a socket that `Link` uses.

    Args:
        memory: `HEADER_BYTES` of words, then the bytes of the ring.

    Attributes:
        words: The words.
    """

    def __cinit__(self, memory):
        PyObject_GetBuffer(memory, &self.memory, PyBUF_WRITABLE)
        if self.memory.len <= HEADER_BYTES or <size_t>self.memory.buf % sizeof(Word):
            raise ValueError(f"memory: need an aligned page and more, got {self.memory.len} bytes")
        self.words = memory[:HEADER_BYTES].cast("Q")
        self.writes = isinstance(self, RingWriter)
        ring_open(&self.ring, self.memory.buf, self.memory.len, self.writes)

    def __dealloc__(self):
        PyBuffer_Release(&self.memory)

    cdef long long unread(self) except -1:
        """Return how many bytes are unread."""
        cdef uint64_t count = ring_unread(&self.ring, self.writes)
        if count > self.ring.capacity:
            other = "reader" if self.writes else "writer"
            raise ConnectionError(
                f"the {other} of a ring of {self.ring.capacity} bytes says that {count} are unread"
            )
        return count

    def doze(self, bint sleeping):
        """Set whether this end sleeps until the other one wakes it: look once more afterwards."""
        ring_doze(&self.ring, self.writes, sleeping)

    @property
    def other_sleeps(self):
        """Whether the other end wants to be woken."""
        return read_word(&self.ring.words[READER_SLEEPS if self.writes else WRITER_SLEEPS]) != 0


@cython.no_gc
cdef class RingWriter(End):
    """The writing end."""

    def sendmsg(self, buffers):
        """Write as much as there is room for; return how much.

        Raises:
            BlockingIOError: There is none.
            ConnectionError: The reader's counter is invalid: it was overwritten.
        """
        cdef uint64_t room = self.ring.capacity - self.unread(), start = ring_begin(&self.ring), at = start
        cdef Py_buffer data
        if not room:
            raise BlockingIOError
        for each in buffers:
            PyObject_GetBuffer(each, &data, PyBUF_SIMPLE)
            at = ring_put(&self.ring, at, <char *>data.buf, min(<uint64_t>data.len, room - (at - start)))
            PyBuffer_Release(&data)
        ring_end(&self.ring, at)
        return at - start

    @property
    def has_room(self):
        """Whether there is room to write."""
        return ring_unread(&self.ring, True) < self.ring.capacity


@cython.no_gc
cdef class RingReader(End):
    """The reading end."""

    def recv_into(self, buffer):
        """Read available bytes, up to the length of a buffer; return how many.

        Raises:
            BlockingIOError: There are none.
            ConnectionError: The writer's counter is invalid.
        """
        cdef uint64_t unread = self.unread()
        cdef Py_buffer data
        cdef size_t count
        if not unread:
            raise BlockingIOError
        PyObject_GetBuffer(buffer, &data, PyBUF_WRITABLE)
        count = ring_read(&self.ring, <char *>data.buf, data.len, unread)
        PyBuffer_Release(&data)
        return count

    @property
    def has_bytes(self):
        """Whether there is something to read."""
        return ring_has(&self.ring, 1)
