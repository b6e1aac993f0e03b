from dist2.operation.turn cimport Turn


cdef class QueueState:
    cdef Turn turn
    cdef object __weakref__

    cpdef long long enter(self)
    cpdef bint left(self)
    cpdef enter_beside(self)
    cpdef leave_beside(self)
    cpdef long long number_message(self)
    cpdef long long issue(self)
    cpdef bint enter_queued(self)
    cpdef bint lay_down(self)
    cpdef bint pass_on(self)
    cpdef hurry(self)


cdef class CollectiveQueue(QueueState):
    cdef object _name, _running, _drained
    cdef readonly object _thread
    cdef list _jobs
    cdef bint _turned_away, _starting
    cdef long long _ends_ns
    cdef unsigned long _inside

    cpdef leave(self)
    cpdef hand_on(self)
    cpdef put(self, object operation, object job, object left)
    cpdef help(self, object done)
    cpdef bint let_go(self)
    cdef object _work_off(self, object done)
    cdef bint _goes_on(self, object done, object error)
