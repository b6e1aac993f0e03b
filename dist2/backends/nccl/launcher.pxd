cimport cython

from dist2.backends.nccl.launch cimport Launch
from dist2.backends.nccl.ticket cimport Ticket
from dist2.backends.nccl.watchdog cimport Watchdog
from dist2.operation.record cimport Operation


cdef class Launcher:
    cdef public object communicators
    cdef object _info, _outside, _device, _library, _meet, _making, _batches, _health
    cdef bint _blocks, _strict, _timing
    cdef dict _streams, _first
    cdef Watchdog _watchdog
    cdef object __weakref__

    @cython.locals(ticket=Ticket)
    cpdef object launch(self, object planned, Operation operation, object inputs, object outputs)
    @cython.locals(first=Ticket, each=Ticket, launch=Launch)
    cdef object _put(self, list tickets, bint timed)
