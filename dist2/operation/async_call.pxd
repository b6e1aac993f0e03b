from dist2.operation.instruments cimport Dispatch
from dist2.operation.plan_cache cimport Plan
from dist2.operation.record cimport Operation


cdef Dispatch DISPATCH


cdef class AsyncCall:
    cdef object _runner, _inputs, _outputs, _error, _completion
    cdef Plan _plan
    cdef readonly Operation _operation
    cdef public object _work
    cdef public long long _ends_ns
    cdef bint _done
