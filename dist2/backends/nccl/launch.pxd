cdef class Launch:
    cdef object _device, _stream, _handle, _communicator
    cdef list _calls, _after
    cdef public list kept
    cdef public bint plain
