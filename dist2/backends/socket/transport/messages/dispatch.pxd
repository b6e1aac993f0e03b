cimport cython

from dist2.backends.socket.transport.links.link cimport Link
from dist2.backends.socket.transport.links.linkage cimport Linkage
from dist2.backends.socket.transport.messages.courier cimport Courier
from dist2.backends.socket.transport.messages.credit cimport Account
from dist2.backends.socket.transport.messages.delivery cimport Delivery
from dist2.backends.socket.transport.messages.mailbox cimport Arrived, Mailbox
from dist2.backends.socket.transport.messages.outcomes cimport Outcomes
from dist2.backends.socket.transport.messages.transfer cimport Receiving, Sending


cdef class Dispatch:
    cdef Linkage _linkage
    cdef Courier _courier
    cdef object _presence, _comparison
    cdef Outcomes _outcomes
    cdef Delivery _delivery

    @cython.locals(account=Account)
    cpdef post_send(self, Mailbox mailbox, Sending sending)
    @cython.locals(arrived=Arrived)
    cpdef post_recv(self, Mailbox mailbox, Receiving receiving)
    cdef object _refusal(self, Mailbox mailbox, object peer)
    @cython.locals(link=Link, account=Account, sent="bint")
    cdef _send(self, Mailbox mailbox, Sending sending)
