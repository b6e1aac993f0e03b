cimport cython

from dist2.backends.socket.transport.links.linkage cimport Linkage
from dist2.backends.socket.transport.messages.mailbox cimport Mailbox
from dist2.backends.socket.transport.messages.transfer cimport Transfer, Receiving, Sending


cdef class Outcomes:
    cdef Linkage _linkage
    cdef public list finished
    cdef dict _mailboxes

    cpdef finish(self, Transfer message, object error)
    @cython.locals(mailbox=Mailbox)
    cpdef message_sent(self, Sending sending)
    @cython.locals(mailbox=Mailbox)
    cpdef message_received(self, Receiving receiving)
