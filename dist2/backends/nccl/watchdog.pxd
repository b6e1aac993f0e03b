from dist2.backends.nccl.ticket cimport Ticket


cdef class Watchdog:
    cdef object _prepare, _name, _wait, _wake, _async_error, _broken, _lock, _changed, _thread
    cdef dict _queues
    cdef long long _soonest_ns, _asked_ns
    cdef bint _has_sooner, _ends
    cdef unsigned long _watching
    cdef object __weakref__

    cpdef object watch(self, Ticket ticket)
