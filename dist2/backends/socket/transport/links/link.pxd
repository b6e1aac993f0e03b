from dist2.backends.socket.transport.links.ring cimport RingReader, RingWriter


cdef class Link:
    cdef public object sock, peer_id, receiving, reader
    cdef public dict incoming
    cdef public bint wants_write, leased
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
    cpdef wake_peer(self)
