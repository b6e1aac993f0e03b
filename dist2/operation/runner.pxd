cimport cython

from dist2.operation.async_call cimport AsyncCall
from dist2.operation.instruments cimport Dispatch
from dist2.operation.places cimport Places
from dist2.operation.plan_cache cimport Plan, Plans
from dist2.operation.queue cimport CollectiveQueue
from dist2.operation.record cimport Operation


cdef Dispatch DISPATCH


cdef class GroupState:
    cdef public long long limit_ns
    cdef public object fault
    cdef public bint aborted
    cdef public tuple hooks
    cdef readonly dict batches


cdef class OperationRunner:
    cdef public object info, backend, on_failure, here
    cdef readonly GroupState state
    cdef readonly CollectiveQueue queue
    cdef readonly Plans plans
    cdef public bint closed
    cdef bint _natively_async, _stream_ordered
    cdef object _work_type
    cdef readonly set _in_flight
    cdef object __weakref__

    cdef object run_at(
        self, Plan plan, object inputs, object outputs, bint async_op, object timeout, const Places *places
    )
    cdef object run_beside_at(
        self, Plan plan, object inputs, object outputs, bint async_op, object timeout, const Places *places
    )
    cdef object send_first(self, Plan plan, object tensor, size_t address, bint async_op)
    cdef long long _limit_ns(self, object timeout) except -1
    cpdef Operation _begin(self, object signature, bint async_op, object timeout)
    cdef bint _takes_calls(self) noexcept
    cdef object _execute(self, Plan plan, Operation operation, object inputs, object outputs, const Places *places)
    cpdef int _finished(self, Operation operation) except -1
    cdef object _work(self, Plan plan, Operation operation, object outputs, object pending)
    cdef int _left(self, bint waited) except -1
    cdef AsyncCall _pending(self, Plan plan, Operation operation, object inputs, object outputs)
    cdef object _issue(self, AsyncCall call)
