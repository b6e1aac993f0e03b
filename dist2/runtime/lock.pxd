cdef class Lock:
    cdef bint _held
    cdef int _waiters
    cdef object _gate

    cdef bint take(self) noexcept
    cdef int enter(self) except -1
    cdef int give(self) except -1
    cdef int _wait(self) except -1
    cdef int _open_gate(self) except -1
