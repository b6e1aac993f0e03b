cimport cython

from dist2.backends.socket.transport.links.rings cimport Rings
from dist2.backends.socket.transport.rounds cimport Rounds
from dist2.backends.socket.transport.spinning cimport Crowd, Spinning
from dist2.runtime.lock cimport Lock


cdef class Poller:
    cdef readonly object spins, wake
    cdef readonly Crowd crowd
    cdef readonly Lock role
    cdef public bint closed
    cdef Lock _lock
    cdef Rounds _rounds
    cdef object _dispatch, _outcomes, _mailboxes, _changed, _background
    cdef Rings _rings
    cdef public long _waiters
    cdef long _told, _looks
    cdef bint _background_polls
    cdef readonly long long _glanced_ns
    cdef public long long _called_ns

    cpdef tell_waiters(self)
    @cython.locals(wakeful=Spinning, looked="bint", now="long long", left_s="double")
    cpdef bint run_until(self, object done, long long deadline_ns, object interrupted, bint spins=*) except -1
    cpdef _poll(self, double left_s, bint awake)
    cdef _wait_for_role(self, object done, double left_s)
    cpdef bint is_wanted(self) except -1
    cpdef progress(self, double timeout_s)
    cpdef glance(self, bint seldom=*)
    cpdef tell_finished(self)
