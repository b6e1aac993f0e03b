cimport cython

from dist2.operation.record cimport Operation


cdef class Work:
    cdef public object operation, outputs, helper
    cdef readonly object _pending
    cdef tuple _deliveries
    cdef long _process
    cdef object __weakref__


@cython.locals(work=Work)
cdef Work completed(Operation operation, object outputs)
