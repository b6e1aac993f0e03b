from dist2.operation.execution cimport StreamOrdered
from dist2.operation.record cimport Operation


cdef class Ticket(StreamOrdered):
    cdef public Operation operation
    cdef public object planned, inputs, outputs, stream, handle, notice, start, end, kept
    cdef object _device, _health, _block, _lock, _error
    cdef tuple _callbacks
    cdef object __weakref__

    cpdef bint passed(self) except -1
    cdef bint _has_ended(self) except -1
    cpdef bint is_placed(self) except -1
    cpdef object recycle(self)
