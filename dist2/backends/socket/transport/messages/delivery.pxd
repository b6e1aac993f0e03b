cimport cython

from dist2.backends.socket.transport.links.link cimport Link
from dist2.backends.socket.transport.messages.credit cimport Account
from dist2.backends.socket.transport.messages.mailbox cimport Arrived, Mailbox
from dist2.backends.socket.transport.messages.outcomes cimport Outcomes
from dist2.backends.socket.transport.messages.transfer cimport Receiving
from dist2.backends.socket.wire cimport Header


cdef class Delivery:
    cdef object _courier, _comparison
    cdef Outcomes _outcomes

    @cython.locals(receiving=Receiving)
    cpdef place(self, Mailbox mailbox, Arrived arrived)
    @cython.locals(header=Header)
    cpdef deliver(self, Mailbox mailbox, Arrived arrived, Receiving receiving)
    cdef _accept(self, Mailbox mailbox, Receiving receiving, Link link, object number)
    @cython.locals(account=Account)
    cpdef account_for(self, Mailbox mailbox, object peer, bint tagged, long long cost)
    @cython.locals(receiving=Receiving)
    cpdef begin_eager(self, Link link, Mailbox mailbox, object peer, Header header)
    @cython.locals(receiving=Receiving)
    cpdef end_eager(self, Link link)
    @cython.locals(receiving=Receiving)
    cpdef begin_segment(self, Link link, Header header)
    @cython.locals(receiving=Receiving)
    cpdef end_segment(self, Link link, Header header)
