cimport cython

from dist2.backends.socket.transport.links.ring cimport RingReader, RingWriter
from dist2.backends.socket.transport.messages.transfer cimport Receiving, Sending
from dist2.backends.socket.wire cimport FrameReader


cdef class Link:
    cdef public object sock, peer_id
    cdef public Receiving receiving
    cdef readonly FrameReader reader
    cdef public dict incoming
    cdef public bint wants_write
    cdef public long long held, settling, silent
    cdef public RingWriter tx
    cdef public RingReader rx
    cdef object _owner, _frames, _bulk, _segment_of
    cdef list _writing, _batch
    cdef public bint _broken
    cdef bint _open
    cdef object __weakref__

    cpdef bint is_idle(self) except -1
    cpdef bint is_clear(self) except -1
    cpdef put(self, object frame)
    cpdef bint send(self, object header, Sending sending) except -1
    cpdef go_on(self, object header, Sending sending, Py_ssize_t count)
    cpdef flush(self)
    cdef bint _next_frame(self) except -1
    cdef _written(self, Py_ssize_t count)
    cdef _pass_over(self, Py_ssize_t count)
    cdef object _target(self)
    @cython.locals(reader=FrameReader, count=Py_ssize_t, turn="int")
    cpdef bint read(self) except -1
    @cython.locals(reader=FrameReader)
    cpdef bint read_ring(self) except -1
    cpdef wake_peer(self)
