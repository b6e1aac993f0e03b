cimport cython

cdef Py_ssize_t _HEADER_BYTES, _DIRECT_BYTES
cdef int _MAGIC, _WAKE


cdef packed struct Fields:
    unsigned char magic, kind
    unsigned short flags
    unsigned int nbytes
    unsigned long long context, seq
    long long tag
    unsigned long long fingerprint, transfer, total


@cython.final
cdef class Header:
    cdef public object kind
    cdef readonly unsigned short flags
    cdef readonly unsigned int nbytes
    cdef readonly unsigned long long context, seq, fingerprint, transfer, total
    cdef readonly long long tag

    @cython.locals(fields="Fields *")
    cpdef bytes encode(self)


@cython.locals(header=Header, fields="Fields *", nbytes="unsigned int", total="unsigned long long", wrong="bint")
cdef Header read_header(const char *at)


cdef class FrameReader:
    cdef public bint awaits_long
    cdef object _begin, _end, _staging, _sink
    cdef Header _header
    cdef char *_at
    cdef Py_ssize_t _filled, _missing

    cpdef target(self)
    cpdef received(self, Py_ssize_t count)
    cpdef bint between_frames(self) except -1
    cpdef bint is_amid_long(self) except -1
    @cython.locals(position=Py_ssize_t, filled=Py_ssize_t, take=Py_ssize_t, header=Header)
    cdef _parse(self)
    cdef _keep(self, Py_ssize_t position, Py_ssize_t count)
    @cython.locals(header=Header)
    cdef _finish(self)
