cimport cython

from dist2.backends.socket.transport.messages.dispatch cimport Dispatch
from dist2.backends.socket.transport.messages.mailbox cimport Mailbox
from dist2.backends.socket.transport.messages.transfer cimport Receiving, Sending
from dist2.backends.socket.transport.poller cimport Poller
from dist2.runtime.lock cimport Lock


cdef class FabricEndpoint:
    cdef readonly long rank, world_size
    cdef readonly long long waited_ns
    cdef readonly object _fabric
    cdef readonly Mailbox _mailbox
    cdef object _inquiry, _ballot, _spins, _lone_spins
    cdef Poller _poller
    cdef Dispatch _dispatch
    cdef Lock _lock
    cdef object __weakref__

    cdef Sending _send(self, Sending sending)
    cdef Receiving _recv(self, Receiving receiving)
    cdef bint _run_until(self, object done, long long deadline_ns) except -1
    @cython.locals(poller=Poller, since_ns="long long", idle_ns="long long")
    cdef bint _poll_until(self, object done, long long deadline_ns) except -1
    cpdef bint _interrupted(self) except -1
