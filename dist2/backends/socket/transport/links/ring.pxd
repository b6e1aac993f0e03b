"""Rings in shared memory: the types and functions of dist2/core/ring.h."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "ring.h" nogil:
    enum:
        RING_PAGE_WORDS, READER_SLEEPS, WRITER_SLEEPS, MOST_READERS
    ctypedef struct Word:
        pass
    ctypedef struct Ring:
        Word *words
        uint64_t capacity, count
    uint64_t read_word(const Word *)
    int64_t clock_ns()
    void ring_open(Ring *, void *, size_t, bint)
    bint ring_has(const Ring *, uint64_t)
    uint64_t ring_unread(const Ring *, bint)
    bint ring_push(Ring *, const char *, size_t, const char *, size_t)
    bint ring_pull(Ring *, const char *, size_t, char *, size_t)
    bint ring_pull_like(Ring *, const char *, size_t, char *, size_t)
    void ring_consume(Ring *, uint64_t)
    uint64_t ring_begin(Ring *)
    uint64_t ring_put(Ring *, uint64_t, const char *, size_t)
    void ring_end(Ring *, uint64_t)
    size_t ring_read(Ring *, char *, size_t, uint64_t)
    void ring_doze(Ring *, bint, bint)
    ctypedef struct Together:
        int turns, unused
        uint64_t partings
    ctypedef struct RingWait:
        const Ring *ring
        const Ring **others
        int count, slow
        int64_t end_ns
        Together *together
    bint ring_look(const Ring *, Together *, long, long)
    bint ring_yield(RingWait *)


cdef class End:
    cdef Ring ring
    cdef Py_buffer memory
    cdef readonly object words
    cdef bint writes

    cdef long long unread(self) except -1


cdef class RingWriter(End):
    pass


cdef class RingReader(End):
    pass
