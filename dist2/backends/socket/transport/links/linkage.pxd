cimport cython

from dist2.backends.socket.transport.links.link cimport Link
from dist2.backends.socket.transport.links.rings cimport Rings


cdef class Linkage:
    cdef readonly dict links, outgoing, entering
    cdef readonly Rings rings
    cdef readonly Link recent
    cdef public bint gathers
    cdef public object congestion
    cdef object _epoll, _presence, _linked, _heartbeat_s, _shortage, _owner
    cdef long long _short_at_ns
    cdef set _logged_shortages

    cpdef send(self, Link link, object frame)
    cpdef say(self, Link link, object frame)
    @cython.locals(wanted="bint")
    cpdef flush(self, Link link)
    @cython.locals(link=Link)
    cpdef flush_all(self)
    cpdef bint read(self, Link link, bint of_ring=*) except -1
    @cython.locals(came="bint")
    cpdef bint read_recent(self) except -1
    @cython.locals(link=Link)
    cpdef bint is_amid_frame(self) except -1
    @cython.locals(link=Link, moved="bint")
    cpdef bint move_rings(self) except -1
    cpdef serve(self, Link link, object event)
