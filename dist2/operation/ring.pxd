cimport cython

from dist2.operation.record cimport Listener, Operation


cdef class Ring(Listener):
    cdef list _slots
    cdef Py_ssize_t _capacity, _next, _kept
    cdef object _last_group, _last_tail
    cdef dict _tails

    @cython.locals(tail=Ring)
    cdef int hear(self, Operation operation) except -1
    @cython.locals(operation=Operation)
    cdef Ring _tail_of(self, object operation)

    @cython.locals(made=list, first=cython.Py_ssize_t, index=cython.Py_ssize_t)
    cpdef list recent(self)
    cdef object _push(self, object operation)
    cpdef bint _put(self, object old, object new)
