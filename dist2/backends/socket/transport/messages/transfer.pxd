cimport cython

from dist2.backends.socket.wire cimport Header


cdef class Transfer:
    cdef public long long number, seq, tag, nbytes, source, peer, deadline_ns
    cdef public unsigned long long context, fingerprint
    cdef public bint tagged, done
    cdef public object data, error
    cdef object _callbacks
    cdef object __weakref__

    cpdef tell(self)


cdef class Sending(Transfer):
    cdef public long long offset
    cdef public bint accepted, unasked

    cpdef Header header(self, object kind, unsigned int nbytes, unsigned long long transfer)


cdef class Receiving(Transfer):
    cdef public long long missing

    cpdef bint fits(self, Header header) except -1
