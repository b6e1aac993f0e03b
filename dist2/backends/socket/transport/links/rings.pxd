cimport cython

from dist2.backends.socket.transport.links.ring cimport RingReader


cdef class Rings:
    cdef public object maker
    cdef readonly set links
    cdef readonly dict links_from
    cdef readonly tuple readers

    @cython.locals(reader=RingReader)
    cpdef bint have_bytes(self, int looks) except -1
