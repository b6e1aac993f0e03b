cdef class Account:
    cdef public long long used, owed, held
    cdef public object waiting
