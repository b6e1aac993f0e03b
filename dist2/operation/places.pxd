"""Addresses of the tensors of a call, which plans in C read while the call is under way."""

cdef struct Span:  # where a tensor lies: its first byte, and the one behind its last
    size_t start, end

cdef struct Places:  # the one that makes this keeps the tensors alive
    Py_ssize_t count
    void **tensors
    const Span *spans
