# cython: language_level=3
"""`CALLS`: the record of a call, for code in C (``compiled/source/calls.h``)."""

from cpython.pycapsule cimport PyCapsule_New
from cpython.object cimport PyObject, PyTypeObject

from dist2.operation.places cimport Places
from dist2.operation.record cimport Operation


cdef extern from "calls.h":
    const char *CALLS_NAME
    ctypedef struct CallFields:
        long long created_ns, deadline_ns
        const Places *places
        int is_async
    ctypedef struct Calls:
        PyTypeObject *type
        void (*read)(PyObject *, CallFields *) noexcept
        void (*set_source)(PyObject *, int) noexcept


cdef void read(PyObject *operation, CallFields *fields) noexcept:
    cdef Operation record = <Operation>operation
    fields.created_ns = record.created_ns
    fields.deadline_ns = record.deadline_ns
    fields.places = record._places
    fields.is_async = record._is_async


cdef void set_source(PyObject *operation, int source) noexcept:
    (<Operation>operation).source = source


cdef Calls calls
calls.type = <PyTypeObject *>Operation
calls.read = read
calls.set_source = set_source

CALLS = PyCapsule_New(&calls, CALLS_NAME, NULL)
