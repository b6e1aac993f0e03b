cdef class Lock:
    cdef bint _held
    cdef int _waiters
    cdef unsigned long _holder
    cdef object _gate, __weakref__

    cdef bint take(self) noexcept
    cdef int enter(self) except -1
    cdef int give(self) except -1
    cdef int _wait(self) except -1
    cdef int _open_gate(self) except -1
