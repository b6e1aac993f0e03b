cimport cython

from dist2.operation.record cimport Operation


cdef class CompletedWork:
    cdef public object operation, outputs
    cdef object __weakref__


@cython.locals(work=CompletedWork)
cdef CompletedWork completed(Operation operation, object outputs)
