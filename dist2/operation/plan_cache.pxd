from dist2.operation.lanes cimport Lane
from dist2.operation.tensors cimport KeyedPlans


cdef class Plan:
    cdef readonly object signature, execute
    cdef Lane *lane


cdef class Plans:
    cdef readonly KeyedPlans keyed
    cdef object _others
