from dist2.operation.record cimport Operation
from dist2.operation.tensors cimport KeyedPlans


cdef class Lane:
    cdef int send(self, const char *address, long long now) except -1
    cdef int sent(self, Operation operation, int sent) except -1


cdef class Plan:
    cdef readonly object signature, execute
    cdef Lane lane


cdef class Plans:
    cdef readonly KeyedPlans keyed
    cdef object _others
