cimport cython

from dist2.operation.record cimport Listener, Operation


cdef class Calling(Listener):
    cdef object _method


cdef class Dispatch:
    cdef public object instruments, on_raise
    cdef public tuple operation_started, operation_finished
    cdef public dict profiler
    cdef object _ranges, _lock
    cdef bint _loaded
    cpdef int notice(self, Operation operation) except -1
    cpdef int started(self, Operation operation) except -1
    cpdef int finished(self, Operation operation) except -1


@cython.locals(at=cython.Py_ssize_t, listener=Listener)
cpdef int tell(tuple listeners, Operation operation, object failed) except -1
