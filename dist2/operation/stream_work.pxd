from dist2.operation.work cimport Work


cdef class StreamWork(Work):
    cdef public object ordered
