cimport cython

from dist2.operation.places cimport Places


cdef int KEPT
cdef list known_codes, known_inside
cdef object known_here


cdef class Operation:
    cdef public object signature, error, code
    cdef public long long seq, deadline_ns, created_ns, started_ns, finished_ns
    cdef public int instruction, source
    cdef bint _is_async
    cdef const Places *_places
    cdef object __weakref__
    @cython.locals(at=cython.Py_ssize_t)
    cdef int note_caller(self, object here) except -1


cdef class Listener:
    cdef int hear(self, Operation operation) except -1


@cython.locals(self=Operation)
cdef Operation begin(object signature, long long created_ns, long long limit_ns, bint is_async, object here)
