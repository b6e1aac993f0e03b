"""The way by which a message is sent before it is recorded: ``lanes.h``."""

from cpython.pycapsule cimport PyCapsule_GetPointer


cdef extern from "lanes.h":
    const char *LANE_NAME
    ctypedef struct Lane:
        int (*send)(object execute, const char *address, long long now) noexcept
        int (*sent)(object execute, object operation, int sent) except -1


cdef inline Lane *lane_of(object capsule) except? NULL:
    """Return the lane in a capsule; NULL for None."""
    return NULL if capsule is None else <Lane *>PyCapsule_GetPointer(capsule, LANE_NAME)
