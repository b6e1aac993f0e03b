cdef class Helped:
    pass


cdef class StreamOrdered(Helped):
    cdef public bint over
