"""Addresses of the tensors of a call, which plans in C read while the call is under way."""

cdef extern from "places.h":
    ctypedef struct Span:
        size_t start, end
    ctypedef struct Places:
        Py_ssize_t count
        void **tensors
        const Span *spans
