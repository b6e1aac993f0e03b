cimport cython

from dist2.operation.record cimport Listener, Operation

cdef int SUM_NS, BYTES, MAX_NS, LAST_SEQ, PLACES, VALUE_BITS
cdef long long VALUE_END


cdef class Counters:
    cdef long long _values[69]
    cdef long long _carries[69]
    cdef object _number(self, int place)
    cdef void _grow(self, int place, long long amount) noexcept

    @cython.locals(elapsed="long long")
    cdef bint _count(self, Operation operation, long long nbytes) noexcept


cdef class Entering(Listener):
    cdef set _in_flight


cdef class Counting(Listener):
    cdef set _in_flight
    cdef dict _by_signature
    cdef object _rare
    cdef list _fresh

    @cython.locals(counters=Counters)
    cdef int hear(self, Operation operation) except -1

    @cython.locals(counters=Counters)
    cdef Counters _counters_of(self, object signature)


cdef class Tally:
    cdef public long long count


cdef class Tallying(Listener):
    cdef tuple _kinds
    cdef dict _by_signature
    cdef object _rare

    @cython.locals(tally=Tally)
    cdef int hear(self, Operation operation) except -1
