"""Keys of calls: the layout of their tensors, read in one call of torch for each."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t

from dist2.operation.places cimport Places, Span

cdef enum:
    MOST_WORDS = 128


cdef struct Key:
    int count  # of the words
    int tensors
    bint on_host  # all of them are in the host's memory: only such addresses are passed on
    int64_t words[MOST_WORDS]
    Span spans[MOST_WORDS]
    PyObject *each[MOST_WORDS]  # borrowed from the lists of the call


cdef char *address_of(object tensor) except? NULL
cdef bint make_key(Key *key, object inputs, object outputs)
cdef void places_of(Key *key, Places *places) noexcept


cdef class Recent:
    cdef object kind, first, second, plan
    cdef int count
    cdef int64_t words[8]


cdef class KeyedPlans:
    cdef readonly dict plans
    cdef list recent
    cdef int most
    cdef object plan_of(self, Key *key, object kind, object first, object second)
    cpdef find(self, kind, agreed, inputs, outputs)
    cpdef bint keep(self, kind, agreed, inputs, outputs, plan)
    cpdef bint takes(self, inputs, outputs)
    cpdef void clear(self)


cdef object ALONE
