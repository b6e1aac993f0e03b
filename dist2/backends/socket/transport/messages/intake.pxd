cimport cython

from dist2.backends.socket.transport.links.link cimport Link
from dist2.backends.socket.transport.messages.delivery cimport Delivery
from dist2.backends.socket.transport.messages.mailbox cimport Mailbox
from dist2.backends.socket.wire cimport Header


cdef class Intake:
    cdef dict _mailboxes, _handlers, _payloads
    cdef object _rings, _presence, _outcomes, _departures, _absent, _origins, _given_up
    cdef Delivery _delivery

    cpdef frame_begins(self, Link link, Header header)
    cpdef frame_ended(self, Link link, Header header)
    @cython.locals(mailbox=Mailbox)
    cdef _place_of_eager(self, Link link, Header header)
    @cython.locals(mailbox=Mailbox)
    cpdef act_on(self, Link link, Header header, object payload)
