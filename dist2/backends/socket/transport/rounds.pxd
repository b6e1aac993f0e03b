cimport cython

from dist2.backends.socket.transport.links.linkage cimport Linkage
from dist2.runtime.lock cimport Lock


cdef class Rounds:
    cdef Lock _lock
    cdef object _epoll, _alarm, _presence, _reception, _courier, _departures
    cdef readonly Linkage linkage
    cdef long _busy
    cdef readonly long long idle_ns

    @cython.locals(linkage=Linkage)
    cpdef make(self, double timeout_s)
    cdef _poll(self, double timeout_s)
    @cython.locals(linkage=Linkage, moved="bint")
    cdef bint _serve_busy(self, bint sleepy) except -1
    cdef _serve(self, object fd, object event)
