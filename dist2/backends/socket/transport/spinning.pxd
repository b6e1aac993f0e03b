cimport cython


cdef class Crowd:
    cdef public long long _until
    cdef long long _pause
    cdef int _slow

    cpdef bint is_here(self, long long now_ns) except -1
    @cython.locals(before="long long", now="long long")
    cpdef long long give_way(self) except -1
    @cython.locals(lasting="bint")
    cpdef _note(self, long long now_ns)


cdef class Spinning:
    cdef long long _until
    cdef Crowd _crowd
    cdef bint _looks

    @cython.locals(looks="bint")
    cpdef bint at(self, long long now_ns, bint is_amid=*) except -1
