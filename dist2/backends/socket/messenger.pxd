from dist2.backends.socket.transport.messages.transfer cimport Transfer
from dist2.operation.execution cimport Helped
from dist2.operation.record cimport Operation


cdef class Arriving(Helped):
    cdef object _endpoint, _target, _tensor, _callback
    cdef Operation _operation
    cdef Transfer _transfer


cpdef note_arrival(Operation operation, Transfer transfer, object tensor, object target)
