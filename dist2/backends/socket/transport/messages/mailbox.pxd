cimport cython

from dist2.backends.socket.transport.messages.transfer cimport Receiving, Sending
from dist2.backends.socket.wire cimport Header

cpdef tuple key_of(Header header, long peer)


cdef class Arrived:
    cdef readonly Header header
    cdef readonly long peer
    cdef readonly object order, link
    cdef public object payload
    cdef public Sending local
    cdef readonly tuple key


cdef class Mailbox:
    cdef readonly unsigned long long context
    cdef readonly long rank
    cdef readonly tuple cards, fabric_ids, accounts
    cdef readonly object uid, names, beside, calls
    cdef readonly bint inside
    cdef public long long ask_ns, asked_ns
    cdef public object apart, gave_up, fault, aborted, reason, on_revoked
    cdef public long lost
    cdef readonly set answered, left, aborters, accepted
    cdef readonly dict reasons, followed, unanswered, sending, _posted, _arrived
    cdef dict _ranks
    cdef object _agreements, __weakref__

    @cython.locals(queue=object)
    cpdef Arrived post(self, Receiving receiving)
    cpdef Receiving match(self, tuple key)
    cpdef keep(self, Arrived arrived)
    cdef Arrived _take(self, Arrived arrived)
    cpdef rank_of(self, object fabric_id)
