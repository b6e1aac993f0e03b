from dist2.backends.socket.transport.links.link cimport Link
from dist2.backends.socket.transport.links.linkage cimport Linkage
from dist2.backends.socket.transport.messages.mailbox cimport Mailbox


cdef class Courier:
    cdef Linkage _linkage
    cdef public bint silent
    cdef public list put_off
    cdef readonly object _connector
    cdef object _presence
    cdef dict _outgoing

    cpdef Link reach(self, Mailbox mailbox, object peer)
    cpdef answer(self, Mailbox mailbox, object peer, object header)
