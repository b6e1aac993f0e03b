cimport cython

from dist2.operation.record cimport Listener, Operation


cdef class Dispatch:
    cdef public object operation_started, operation_finished, instruments, on_raise
    cdef public dict profiler
    cdef object _ranges, _lock
    cdef bint _loaded
    cpdef notice(self, operation)
    cpdef started(self, operation)
    cpdef finished(self, operation)


@cython.locals(at=cython.Py_ssize_t, listener=Listener)
cpdef int tell(tuple listeners, object operation, object failed) except -1
